// add_rms_norm_quantised: add_rms_norm, then quantise_rows.
//
//   x, residual [T, H], weight [H], out e4m3 [T, H], scale float32 [T]
//   grid (T), block (multiple of 32)
//   reference: NumpyOps.add_rms_norm_quantised
//   roofline: 3 T H elements, T H bytes; 0.8 of copy bandwidth from T = 8192
#include "layer/norm_row_quantised.cuh"

extern "C" __global__ void __launch_bounds__(1024) add_rms_norm_quantised(const T* x, T* residual, const T* weight,
                                                                          u8* out, float* scale, int width,
                                                                          float eps) {
    start_next_kernel();
    prefetch_for_few_rows(weight, width * sizeof(T));
    wait_for_previous_kernel();
    const i64 start = static_cast<i64>(blockIdx.x) * width;
    const T* added = x + start;
    T* row = residual + start;
    const bool aligned = width % Vec<T>::SIZE == 0 && is_aligned_16(x) && is_aligned_16(residual) &&
                         is_aligned_16(weight) && is_aligned_16(out);

    const auto add_vec = [added, row](int i) {
        const Vec<T> more = load_vec(added + i);
        Vec<T> sum = load_vec(row + i);
#pragma unroll
        for (int j = 0; j < Vec<T>::SIZE; j++) sum.at[j] = from_float<T>(to_float(sum.at[j]) + to_float(more.at[j]));
        store_vec(row + i, sum);
        return sum;
    };
    const auto add_one = [added, row](int i) {
        row[i] = from_float<T>(to_float(row[i]) + to_float(added[i]));
        return row[i];
    };
    norm_row_quantised(add_vec, add_one, row, weight, out + start, scale + blockIdx.x, width, eps, aligned);
}
