// sum_add_rms_norm: add_rms_norm of x[t] = the sum over ranks of parts[r][t].
//
//   parts [NUM_RANKS] of [T, H]; residual, out [T, H], weight [H]
//   PUSH 0: grid (at most T and MAX_BLOCKS); 1: grid (T), T <= MAX_PUSH_ROWS, rows of 16-byte vectors
//   block as for add_rms_norm
//   reference: NumpyCollectives.sum, then NumpyOps.add_rms_norm
//   roofline: one trip over the links (PUSH), else three, and (NUM_RANKS - 1) T H elements; not measured
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
