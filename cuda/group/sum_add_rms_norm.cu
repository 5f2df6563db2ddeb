// sum_add_rms_norm: add_rms_norm of the sum over ranks of parts [T, H].
//
//   residual, out [T, H], weight [H]
//   grid PUSH 0: at most T and MAX_BLOCKS; 1: T <= MAX_PUSH_ROWS, rows of whole vectors
//   reference: NumpyCollectives.sum, NumpyOps.add_rms_norm
//   roofline: (NUM_RANKS - 1) T H elements, one link latency (PUSH) or three; not measured
#include "group/rank_rows.cuh"
#include "layer/norm_row.cuh"

extern "C" __global__ void __launch_bounds__(1024)
    sum_add_rms_norm(const __grid_constant__ Group group, const __grid_constant__ PerRank<const T> parts,
                     T* residual, const T* weight, T* out, int num_rows, int width, float eps) {
    start_next_kernel();
    wait_for_previous_kernel();
    const bool aligned = width % Vec<T>::SIZE == 0 && are_aligned(parts) && is_aligned_16(residual) &&
                         is_aligned_16(weight) && is_aligned_16(out);
    add_rows(group, parts, residual, num_rows, width, aligned, [=](auto load_vec, auto load_one, const T* row, int t) {
        norm_row(load_vec, load_one, row, weight, out + static_cast<i64>(t) * width, width, eps, aligned);
    });
}
