// sum_add_rms_norm_quantised: sum_add_rms_norm, then quantise_rows.
//
//   grid, block and roofline as sum_add_rms_norm; not measured
//   reference: NumpyCollectives.sum, NumpyOps.add_rms_norm_quantised
#include "group/rank_rows.cuh"
#include "layer/norm_row_quantised.cuh"

extern "C" __global__ void __launch_bounds__(1024)
    sum_add_rms_norm_quantised(const __grid_constant__ Group group,
                               const __grid_constant__ PerRank<const T> parts, T* residual, const T* weight, u8* out,
                               float* scale, int num_rows, int width, float eps) {
    start_next_kernel();
    wait_for_previous_kernel();
    const bool aligned = width % Vec<T>::SIZE == 0 && are_aligned(parts) && is_aligned_16(residual) &&
                         is_aligned_16(weight) && is_aligned_16(out);
    add_rows(group, parts, residual, num_rows, width, aligned, [=](auto load_vec, auto load_one, const T* row, int t) {
        u8* normed = out + static_cast<i64>(t) * width;
        norm_row_quantised(load_vec, load_one, row, weight, normed, scale + t, width, eps, aligned);
    });
}
