// experts_lora: out[p, n] += b[i, n] . (a[i, part of n] x[row of p]) for sorted (row, expert) pairs p (LoRA of MoE
// experts); adapter i = slots[row] E + expert.
//
//   out [P, N], float32 if OUT_FLOAT; x [T, K], or [P, K] if x_is_sorted
//   a [S E, parts, R, K]; b [S E, N, R], scaled, zeros beyond the rank; ranks int32 [S E], 0: no change
//   rows int32 [P], offsets int32 [E + 1] of group_by_expert, or null: pairs are rows of one expert
//   slots int32 [T], -1: none; K and R multiples of 8; parts have N / parts columns; all aligned to 16 bytes
//   grid (ceil(P / PAIRS), parts, ceil(N / parts / block_columns)), block 256, shared 4 PAIRS R bytes: a block takes
//   runs of pairs that share an adapter; a warp computes two of the rank's dot products at a time, a thread one column
//   reference: NumpyOps.lora_add. Sums in float32, in an order independent of other pairs; rounded once
//   roofline: an adapter's rank (parts K + N) elements read once per run
#include "common/types.cuh"

constexpr int WARPS = 8;
constexpr int THREADS = WARPS * WARP_SIZE;
constexpr int OUTPUTS = 2;
constexpr int SIZE = Vec<T>::SIZE;
constexpr int NO_ADAPTER = -1;

#if OUT_FLOAT
using Out = float;
#else
using Out = T;
#endif

// shrunk[m, o] = a[o] . x[x_rows[m]] for the run's pairs m; zero-padded from the rank to a whole vector.
__device__ __forceinline__ void shrink(float* shrunk, const T* x, const T* a, const int* x_rows, int count, int rank,
                                       int num_inputs, int max_rank) {
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    const T* inputs[PAIRS];
#pragma unroll
    for (int m = 0; m < PAIRS; m++) inputs[m] = x + static_cast<i64>(x_rows[min(m, count - 1)]) * num_inputs;
    for (int o = warp * OUTPUTS; o < (rank + SIZE - 1) / SIZE * SIZE; o += WARPS * OUTPUTS) {
        float sums[OUTPUTS][PAIRS] = {};
        const T* weights = a + static_cast<i64>(o) * num_inputs;  // all max_rank rows may be read
#pragma unroll PAIRS == 1 ? 4 : 2
        for (int k = lane * SIZE; k < num_inputs; k += WARP_SIZE * SIZE) {
            Vec<T> by[OUTPUTS];
#pragma unroll
            for (int j = 0; j < OUTPUTS; j++) by[j] = load_vec(weights + static_cast<i64>(j) * num_inputs + k);
#pragma unroll
            for (int m = 0; m < PAIRS; m++) {
                if (m >= count) break;
                const Vec<T> values = load_vec(inputs[m] + k);
#pragma unroll
                for (int j = 0; j < OUTPUTS; j++) {
#pragma unroll
                    for (int e = 0; e < SIZE; e++) sums[j][m] += to_float(values.at[e]) * to_float(by[j].at[e]);
                }
            }
        }
#pragma unroll
        for (int m = 0; m < PAIRS; m++) {
            if (m >= count) break;
#pragma unroll
            for (int j = 0; j < OUTPUTS; j++) {
                const float sum = warp_sum(sums[j][m]);
                if (lane == 0) shrunk[m * max_rank + o + j] = o + j < rank ? sum : 0.0f;
            }
        }
    }
}

// Adds to columns first..last - 1 of the run's pairs, which are adjacent in `out`.
__device__ __forceinline__ void expand(Out* out, const float* shrunk, const T* b, int count, int rank, int first,
                                       int last, int width, int max_rank) {
    for (int n = first + static_cast<int>(threadIdx.x); n < last; n += THREADS) {
        float sums[PAIRS] = {};
        const T* weights = b + static_cast<i64>(n) * max_rank;
        for (int r = 0; r < rank; r += SIZE) {
            const Vec<T> by = load_vec(weights + r);
#pragma unroll
            for (int m = 0; m < PAIRS; m++) {
                if (m >= count) break;
#pragma unroll
                for (int e = 0; e < SIZE; e++) sums[m] += to_float(by.at[e]) * shrunk[m * max_rank + r + e];
            }
        }
#pragma unroll
        for (int m = 0; m < PAIRS; m++) {
            if (m >= count) break;
            Out* at = out + static_cast<i64>(m) * width + n;
            *at = from_float<Out>(to_float(*at) + sums[m]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    experts_lora(Out* out, const T* x, const T* a, const T* b, const int* ranks, const int* rows, const int* offsets,
                 const int* slots, int num_pairs, int num_experts, int num_inputs, int width, int num_parts,
                 int max_rank, int x_is_sorted, int block_columns) {
    extern __shared__ __align__(16) float shrunk[];
    __shared__ int adapters[PAIRS], x_rows[PAIRS], experts[PAIRS];
    start_next_kernel();
    wait_for_previous_kernel();
    const int begin = blockIdx.x * PAIRS, end = min(begin + PAIRS, num_pairs), mine = begin + threadIdx.x;
    const int row = rows == nullptr ? mine : mine < end ? rows[mine] : 0;  // undefined beyond the experts' pairs
    if (threadIdx.x < PAIRS) experts[threadIdx.x] = offsets == nullptr && mine < end ? 0 : NO_ADAPTER;
    __syncthreads();
    for (int e = threadIdx.x; e < num_experts && offsets != nullptr; e += THREADS) {
        const int last = min(offsets[e + 1], end);
        for (int p = max(offsets[e], begin); p < last; p++) experts[p - begin] = e;
    }
    __syncthreads();
    if (threadIdx.x < PAIRS) {
        const int expert = experts[threadIdx.x], slot = expert >= 0 ? slots[row] : NO_ADAPTER;
        adapters[threadIdx.x] = slot < 0 ? NO_ADAPTER : slot * num_experts + expert;
        x_rows[threadIdx.x] = x_is_sorted ? mine : row;
    }
    __syncthreads();

    const int part = blockIdx.y, columns = width / num_parts;
    const int first = part * columns + blockIdx.z * block_columns;
    const int last = min(first + block_columns, (part + 1) * columns);
    for (int m = 0, count; m < end - begin; m += count) {
        const i64 adapter = adapters[m];
        count = 1;
        while (m + count < end - begin && adapters[m + count] == adapter) count++;
        const int rank = adapter < 0 ? 0 : ranks[adapter];
        if (rank == 0) continue;
        shrink(shrunk, x, a + (adapter * num_parts + part) * max_rank * num_inputs, x_rows + m, count, rank,
               num_inputs, max_rank);
        __syncthreads();
        expand(out + static_cast<i64>(begin + m) * width, shrunk, b + adapter * width * max_rank, count, rank, first,
               last, width, max_rank);
        __syncthreads();  // `shrunk` is free
    }
}
