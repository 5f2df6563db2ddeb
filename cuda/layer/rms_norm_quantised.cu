// rms_norm_quantised: rms_norm, then quantise_rows.
//
//   x [T, H], weight [H], out e4m3 [T, H], scale float32 [T]
//   grid (T), block (multiple of 32)
//   reference: NumpyOps.rms_norm_quantised
//   roofline: T H elements read, T H bytes written; 0.6 of copy bandwidth at T = 8192
#include "layer/norm_row_quantised.cuh"

extern "C" __global__ void __launch_bounds__(1024)
    rms_norm_quantised(const T* x, const T* weight, u8* out, float* scale, int width, float eps) {
    start_next_kernel();
    wait_for_previous_kernel();
    const i64 start = static_cast<i64>(blockIdx.x) * width;
    const T* row = x + start;
    const bool aligned =
        width % Vec<T>::SIZE == 0 && is_aligned_16(x) && is_aligned_16(weight) && is_aligned_16(out);
    norm_row_quantised([row](int i) { return load_vec(row + i); }, [row](int i) { return row[i]; }, row, weight,
                       out + start, scale + blockIdx.x, width, eps, aligned);
}
