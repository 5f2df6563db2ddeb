// lora_expand: out[rows[m], n] += shrunk[m, part of n] . b[slot, n], where row m of the step has the adapter in `slot`.
//
//   shrunk float32[M, P, R] of lora_shrink; b [S, N, R], scaled, and out [T, N] of the build's type
//   rows int32[M], runs int32[G, 3], ranks int32[S]: as in lora_shrink; R is a multiple of 8
//   parts of the outputs end at first_end, second_end and N, P of them; unused ends are N
//   grid (ceil(N / 256), G, ceil(longest run / 16)), block 256: a thread makes one column of up to 16 rows
//   reference: NumpyOps.lora_expand: summed in float32, added and rounded once
//   roofline: decodes read each adapter of the step once, N rank elements, and move 2 M N of the outputs
#include "common/types.cuh"

constexpr int NUM_ROWS = 16;

extern "C" __global__ void __launch_bounds__(256)
    lora_expand(T* out, const float* shrunk, const T* b, const int* rows, const int* runs, const int* ranks, int width,
                int num_parts, int max_rank, int first_end, int second_end) {
    start_next_kernel();
    wait_for_previous_kernel();
    const int slot = runs[3 * blockIdx.y], first = runs[3 * blockIdx.y + 1], count = runs[3 * blockIdx.y + 2];
    const int begin = blockIdx.z * NUM_ROWS, num_rows = min(NUM_ROWS, count - begin), rank = ranks[slot];
    const int n = blockIdx.x * blockDim.x + threadIdx.x;
    if (num_rows <= 0 || n >= width || rank == 0) return;

    const int part = (n >= first_end) + (n >= second_end), stride = num_parts * max_rank;
    const float* inputs = shrunk + static_cast<i64>(first + begin) * stride + part * max_rank;
    const T* weights = b + (static_cast<i64>(slot) * width + n) * max_rank;

    constexpr int SIZE = Vec<T>::SIZE;
    float sums[NUM_ROWS] = {};
    for (int r = 0; r < rank; r += SIZE) {
        const Vec<T> weight = load_vec(weights + r);
#pragma unroll
        for (int row = 0; row < NUM_ROWS; ++row) {
            if (row >= num_rows) break;
#pragma unroll
            for (int i = 0; i < SIZE; ++i) {
                if (r + i < rank) sums[row] += inputs[row * stride + r + i] * to_float(weight.at[i]);
            }
        }
    }
#pragma unroll
    for (int row = 0; row < NUM_ROWS; ++row) {
        if (row >= num_rows) break;
        T* at = out + static_cast<i64>(rows[first + begin + row]) * width + n;
        *at = from_float<T>(to_float(*at) + sums[row]);
    }
}
