// lora_shrink: shrunk[m, o] = x[rows[m]] . a[slot, o], where row m of the step has the adapter in `slot`.
//
//   x [T, K], a [S, P * R, K] of the build's type; shrunk float32[M, P * R]; o = p * R + r, r below the adapter's rank
//   rows int32[M]: rows of x, those of one adapter adjacent; runs int32[G, 3]: slot, first of `rows`, number of rows
//   ranks int32[S]; K is a multiple of 16 bytes' elements, x and a are aligned to 16 bytes
//   grid (ceil(P R / 8), G, ceil(longest run / 16)), block 256: a warp makes one output of up to 16 rows
//   reference: NumpyOps.lora_shrink; beyond the rank nothing is written
//   roofline: decodes read each adapter of the step once, P rank K elements; x comes from L2 for every 8 outputs, which
//   long prompts pay for
#include "common/types.cuh"

constexpr int NUM_ROWS = 16;
constexpr int NUM_WARPS = 8;

extern "C" __global__ void __launch_bounds__(NUM_WARPS * WARP_SIZE)
    lora_shrink(float* shrunk, const T* x, const T* a, const int* rows, const int* runs, const int* ranks, int num_inputs,
                int num_parts, int max_rank) {
    start_next_kernel();
    wait_for_previous_kernel();
    const int slot = runs[3 * blockIdx.y], first = runs[3 * blockIdx.y + 1], count = runs[3 * blockIdx.y + 2];
    const int begin = blockIdx.z * NUM_ROWS, num_rows = min(NUM_ROWS, count - begin);
    const int width = num_parts * max_rank, output = blockIdx.x * NUM_WARPS + threadIdx.x / WARP_SIZE;
    if (num_rows <= 0 || output >= width || output % max_rank >= ranks[slot]) return;

    const T* own[NUM_ROWS];
#pragma unroll
    for (int row = 0; row < NUM_ROWS; ++row)
        own[row] = x + static_cast<i64>(rows[first + begin + min(row, num_rows - 1)]) * num_inputs;
    const T* weights = a + (static_cast<i64>(slot) * width + output) * num_inputs;

    constexpr int SIZE = Vec<T>::SIZE;
    float sums[NUM_ROWS] = {};
    const int lane = threadIdx.x % WARP_SIZE;
    for (int k = lane * SIZE; k < num_inputs; k += WARP_SIZE * SIZE) {
        const Vec<T> weight = load_vec(weights + k);
#pragma unroll
        for (int row = 0; row < NUM_ROWS; ++row) {
            if (row >= num_rows) break;
            const Vec<T> input = load_vec(own[row] + k);
#pragma unroll
            for (int i = 0; i < SIZE; ++i) sums[row] += to_float(input.at[i]) * to_float(weight.at[i]);
        }
    }
#pragma unroll
    for (int row = 0; row < NUM_ROWS; ++row) {
        const float sum = warp_sum(sums[row]);
        if (row < num_rows && lane == 0) shrunk[static_cast<i64>(first + begin + row) * width + output] = sum;
    }
}
