// normalise_qk_ranks: normalise_qk over the heads of all ranks.
//
//   qkv [T, columns], q_norm [NUM_RANKS * q_size], k_norm [NUM_RANKS / copies * k_size]
//   squares [NUM_RANKS] of float32 [T, 2]: each rank's sums of squares
//   grid (at most T and MAX_BLOCKS), block (multiple of 32, at least NUM_RANKS)
//   reference: NumpyOps.normalise_qk, with sums in another order
//   roofline: 3 T (q_size + k_size) elements; not measured
#include "group/signals.cuh"

__device__ __forceinline__ float sum_of_squares(const T* row, int size) {
    float sum = 0.0f;
    for (int i = threadIdx.x; i < size; i += blockDim.x) sum += to_float(row[i]) * to_float(row[i]);
    return block_sum(sum);
}

extern "C" __global__ void __launch_bounds__(1024)
    normalise_qk_ranks(const __grid_constant__ Group group, const __grid_constant__ PerRank<float> squares,
                       T* qkv, const T* q_norm, const T* k_norm, int num_rows, int columns, int q_size, int k_size,
                       int copies, float eps) {
    start_next_kernel();
    wait_for_previous_kernel();
    Barrier barrier(group);
    float* own = squares.at[group.rank];
    for (int t = blockIdx.x; t < num_rows; t += gridDim.x) {
        const T* row = qkv + static_cast<i64>(t) * columns;
        const float of_q = sum_of_squares(row, q_size), of_k = sum_of_squares(row + q_size, k_size);
        if (threadIdx.x == 0) {
            own[2 * t] = of_q;
            own[2 * t + 1] = of_k;
        }
    }
    if (!barrier.meet()) return;
    for (int t = blockIdx.x; t < num_rows; t += gridDim.x) {
        float of_q = 0.0f, of_k = 0.0f;
#pragma unroll
        for (int r = 0; r < NUM_RANKS; r++) {
            of_q += load_rank_element(squares.at[r] + 2 * t);
            if (r % copies == 0) of_k += load_rank_element(squares.at[r] + 2 * t + 1);
        }
        T* row = qkv + static_cast<i64>(t) * columns;
        const float by_q = 1.0f / sqrtf(of_q / (q_size * NUM_RANKS) + eps);
        const float by_k = 1.0f / sqrtf(of_k / (k_size * (NUM_RANKS / copies)) + eps);
        const T* q_weight = q_norm + group.rank * q_size;
        const T* k_weight = k_norm + group.rank / copies * k_size;
        for (int i = threadIdx.x; i < q_size; i += blockDim.x)
            row[i] = from_float<T>(to_float(row[i]) * by_q * to_float(q_weight[i]));
        for (int i = threadIdx.x; i < k_size; i += blockDim.x)
            row[q_size + i] = from_float<T>(to_float(row[q_size + i]) * by_k * to_float(k_weight[i]));
    }
    barrier.meet();
    barrier.close();
}
