// experts_sm90: MoE grouped GEMM (expert_items.cuh) on Hopper, 16 bits or e4m3, for experts with many rows.
//
//   X_FP8: e4m3 with x_scale float32 [P], weight_scale float32 [E, N], else both null; maps as in small_m.cuh, of
//   weight [E N, K]; SPLIT 1; K a multiple of 8 (X_FP8: 16)
//   grid: up to one block per SM; block THREADS
//   reference: NumpyOps.experts_linear
//   roofline: 2 P N K operations; N K elements per chunk, mostly from L2: Qwen3-30B-A3B, bf16, gate and up of 8192
//   tokens: 206 GFLOP, 0.26 ms at 790 TFLOP/s; 0.6 of it expected
#if X_FP8
#define WEIGHT_ELEMENTS 128
#define SCALE_BYTES (COLS * 4)
#else
#define WEIGHT_ELEMENTS 64
#define SCALE_BYTES 0
#endif
#define X_BOXES 1
#include "linear/small_m.cuh"
#include "linear/scaled_output.cuh"
#include "experts/expert_items.cuh"

static_assert(SPLIT == 1, "a block sums over all of K");

constexpr int MAX_EXPERTS = 1024;
using Items = ExpertItems<COLS, ROWS>;

__device__ __forceinline__ void fetch_items(const Shared& shared, const Items& items, const TensorMap& weight_map,
                                            const TensorMap& x_map, int num_spans) {
    u32 iteration = 0;
    for (int index = blockIdx.x; index < items.num_items; index += gridDim.x) {
        const ExpertItem item = items.at(index);
        const int row = item.expert * items.n_size + item.tile_row;
        for (int span = 0; span < num_spans; ++span, ++iteration) {
            if (iteration >= STAGES) wait_for(shared.empty(iteration), shared.parity(iteration) ^ 1);
            arrive_expecting(shared.full(iteration), STAGE_BYTES);
            copy_box(shared.weights(iteration), weight_map, span * BOX_ELEMENTS, row, shared.full(iteration));
            copy_box(shared.x(iteration), x_map, span * BOX_ELEMENTS, item.first_pair, shared.full(iteration));
        }
    }
}

__device__ __forceinline__ void keep_scales(const Shared& shared, const float* x_scale, const ExpertItem& item) {
    if (SCALE_BYTES == 0) return;
    sync_named_barrier(1, CONSUMERS);  // the previous item has been stored
    for (int m = threadIdx.x; m < COLS; m += CONSUMERS) {
        const float scale = m < item.num_pairs ? x_scale[item.first_pair + m] : 0.0f;
        asm volatile("st.shared.f32 [%0], %1;" : : "r"(shared.x_scales() + 4 * m), "f"(scale) : "memory");
    }
    sync_named_barrier(1, CONSUMERS);
}

struct Stage {
    static __device__ __forceinline__ void multiply(Sums& sum, u32 weights, u32 x) {
#pragma unroll
        for (int k = 0; k < 128; k += 32) {
#if X_FP8
            multiply_add_e4m3(sum, operand(weights + k, 0), operand(x + k, 0));
#else
            multiply_add(sum, operand(weights + k, 0), operand(x + k, 0));
#endif
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    experts_sm90(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap weight_map,
                 const float* x_scale, const float* weight_scale, const int* offsets, Out* out, int num_experts, int n_size,
                 int k_size) {
    extern __shared__ unsigned char memory[];
    __shared__ int ends[MAX_EXPERTS];
    const Shared shared{(shared_address(memory) + 1023) / 1024 * 1024};
    const BlockWork work(n_size, k_size);  // for its spans
    const bool is_producer = threadIdx.x == CONSUMERS;
    start_next_kernel();
    if (is_producer) {
        prefetch_map(weight_map);
        prefetch_map(x_map);
        make_ring_barriers(shared, CONSUMERS / WARP_SIZE);
        publish_barriers();
    }
    wait_for_previous_kernel();  // which may write `offsets`
    const Items items(offsets, ends, num_experts, n_size);
    if (threadIdx.x >= CONSUMERS) {
        if (is_producer) fetch_items(shared, items, weight_map, x_map, work.num_spans);
        return;
    }
    u32 iteration = 0;
    for (int index = blockIdx.x; index < items.num_items; index += gridDim.x, iteration += work.num_spans) {
        const ExpertItem item = items.at(index);
        Sums sum;
        sum_tile<Stage>(sum, shared, work, iteration);
        keep_scales(shared, x_scale, item);
        const float* scales = weight_scale == nullptr ? nullptr : weight_scale + static_cast<i64>(item.expert) * n_size;
        const OutputTile output(out + static_cast<i64>(item.first_pair) * n_size, shared.x_scales(), scales, nullptr,
                                item.tile_row, item.num_pairs, n_size);
        store_all(sum, output);
    }
}
