// experts_w4a16_sm90: MoE grouped GEMM (expert_items.cuh) with 4-bit weights on Hopper, for experts with many rows.
//
//   x as in small_m_w4a16_sm90, weights as in experts_gemv_w4a16; SPLIT 1, OUT_FLOAT 0
//   grid: up to one block per SM; block THREADS
//   reference: NumpyOps.experts_linear
//   roofline: as experts_sm90, with N K / 2 bytes and the scales per chunk; 0.5 of it expected
#include "linear/small_m_w4a16.cuh"
#include "experts/expert_items.cuh"

static_assert(SPLIT == 1, "a block sums over all of K");

constexpr int MAX_EXPERTS = 1024;
using Items = ExpertItems<COLS, BLOCKS * BLOCK_ROWS>;

struct ExpertWeights {
    const u8* tiles;
    const u16* scale;
    const u8* zero;
    int num_blocks, num_spans, group_spans;  // 16-row blocks; spans along K

    __device__ __forceinline__ void fetch(const Shared& shared, const TensorMap& x_map, const ExpertItem& item, int span,
                                          u32 iteration) const {
        const int first = item.tile_row / BLOCK_ROWS, blocks = min(BLOCKS, num_blocks - first);
        const u32 barrier = shared.full(iteration);
        arrive_expecting(barrier, X_BYTES + blocks * (SPAN_BYTES + GROUPS * (SCALE_BYTES + ZERO_BYTES)));
        const i64 expert_spans = static_cast<i64>(item.expert) * num_spans;
        const i64 piece = (expert_spans + span) * num_blocks + first;
        copy_bytes(shared.weights(iteration), tiles + piece * SPAN_BYTES, blocks * SPAN_BYTES, barrier);
#pragma unroll
        for (int i = 0; i < GROUPS; ++i) {
            const i64 group = GROUPS > 1 ? (expert_spans + span) * GROUPS + i : (expert_spans + span) / group_spans;
            const i64 from = (group * num_blocks + first) * BLOCK_ROWS;
            copy_bytes(shared.scales(iteration) + i * BLOCKS * SCALE_BYTES, scale + from, blocks * SCALE_BYTES, barrier);
            if (ZEROS)
                copy_bytes(shared.zeros(iteration) + i * BLOCKS * ZERO_BYTES, zero + from, blocks * ZERO_BYTES, barrier);
        }
        copy_box(shared.x(iteration), x_map, span * SPAN, item.first_pair, barrier);
        copy_box(shared.x(iteration) + BOX_BYTES, x_map, span * SPAN + SPAN / 2, item.first_pair, barrier);
    }
};

__device__ __forceinline__ void fetch_items(const Shared& shared, const Items& items, const ExpertWeights& weights,
                                            const TensorMap& x_map) {
    u32 iteration = 0;
    for (int index = blockIdx.x; index < items.num_items; index += gridDim.x) {
        const ExpertItem item = items.at(index);
        for (int span = 0; span < weights.num_spans; ++span, ++iteration) {
            if (iteration >= STAGES) wait_for(shared.empty(iteration), shared.parity(iteration) ^ 1);
            weights.fetch(shared, x_map, item, span, iteration);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    experts_w4a16_sm90(const __grid_constant__ TensorMap x_map, const u8* tiles, const u16* scale, const u8* zero,
                       const int* offsets, Out* out, int num_experts, int n_size, int k_size, int group_spans) {
    extern __shared__ unsigned char memory[];
    __shared__ int ends[MAX_EXPERTS];
    const Shared shared{(shared_address(memory) + 1023) / 1024 * 1024};
    const BlockWork work(n_size, k_size);  // for its spans
    const bool fetches = threadIdx.x == CONSUMERS;
    start_next_kernel();
    if (fetches) {
        prefetch_map(x_map);
        make_ring_barriers(shared, CONSUMERS / WARP_SIZE);
        publish_barriers();
    }
    wait_for_previous_kernel();  // which may write `offsets`
    const Items items(offsets, ends, num_experts, n_size);
    if (threadIdx.x >= CONSUMERS) {
        give_up_registers<PRODUCER_REGISTERS>();
        const ExpertWeights weights = {tiles, scale, zero, work.num_blocks, work.num_spans, group_spans};
        if (fetches) fetch_items(shared, items, weights, x_map);
        return;
    }
    take_registers<CONSUMER_REGISTERS>();
    u32 iteration = 0;
    for (int index = blockIdx.x; index < items.num_items; index += gridDim.x, iteration += work.num_spans) {
        const ExpertItem item = items.at(index);
        Sums sum;
        sum_tile(sum, shared, work, iteration);
        Out* rows = out + static_cast<i64>(item.first_pair) * n_size;
        store_all(sum, OutputTile(rows, nullptr, item.tile_row / BLOCK_ROWS, item.num_pairs, n_size));
    }
}
