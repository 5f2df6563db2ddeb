// rms_norm: out = x / sqrt(mean(x^2) + eps) * weight.
//
//   x, out [T, H], weight [H]
//   grid (T), block (multiple of 32)
//   reference: NumpyOps.rms_norm
//   roofline: 2 T H elements; 0.85 of copy bandwidth from T = 2048
#include "layer/norm_row.cuh"

extern "C" __global__ void __launch_bounds__(1024)
    rms_norm(const T* x, const T* weight, T* out, int width, float eps) {
    start_next_kernel();
    wait_for_previous_kernel();
    const i64 start = static_cast<i64>(blockIdx.x) * width;
    const T* row = x + start;
    const bool aligned =
        width % Vec<T>::SIZE == 0 && is_aligned_16(x) && is_aligned_16(weight) && is_aligned_16(out);
    norm_row([row](int i) { return load_vec(row + i); }, [row](int i) { return row[i]; }, row, weight, out + start,
             width, eps, aligned);
}
