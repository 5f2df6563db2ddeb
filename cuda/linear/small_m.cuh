// Hopper GEMM (TMA, wgmma) for up to 256 rows: a transposed output tile is ROWS weight rows x COLS rows of x, 64 weight
// rows per warpgroup. One more warp fetches 128 bytes of each weight row per stage.
//
// Build macros: ROWS (up to 128), COLS, STAGES, AHEAD (weight stages fetched before the previous kernel ends), SPLIT
// (2: two blocks of a cluster split a tile's K and exchange half their sums, in fixed order), SHARED_BYTES, OUT_FLOAT.
// Kernels set WEIGHT_ELEMENTS (of K in 128 bytes), X_BOXES (128-byte boxes of x per stage), SCALE_BYTES (x's scales).
// `weight_map`, `x_map`: 2-D tensor maps, boxes of 64 16-bit elements (8-bit ones count half) x ROWS or COLS rows,
// 128-byte swizzle. Arrays are aligned to 16 bytes, M <= COLS. The order of sums depends only on K and SPLIT.
#pragma once

#include "linear/warpgroup_tile.cuh"

constexpr int WARPGROUPS = (ROWS + 63) / 64;
constexpr int CONSUMERS = WARPGROUP_SIZE * WARPGROUPS;
constexpr int THREADS = CONSUMERS + WARP_SIZE;
constexpr int SPAN = WEIGHT_ELEMENTS;
constexpr int WEIGHT_BYTES = ROWS * 128;
constexpr int BOX_BYTES = COLS * 128;
constexpr int STAGE_BYTES = WEIGHT_BYTES + X_BOXES * BOX_BYTES;
constexpr int SENT_BYTES = SPLIT == 2 ? CONSUMERS * CHUNKS / 2 * 16 : 0;
constexpr int BARRIER_BYTES = 16 * STAGES + 8;
// The last warpgroup always reads 64 rows: past a shorter tile lies x, or this padding.
constexpr int ROWS_PAST = 64 * WARPGROUPS - ROWS - X_BOXES * COLS;
constexpr int PAST_BYTES = ROWS_PAST > 0 ? ROWS_PAST * 128 : 0;
static_assert(AHEAD <= STAGES, "AHEAD stages fit in the ring");
static_assert(ROWS % 8 == 0 && ROWS <= 128 && COLS % 16 == 0 && COLS <= 256, "whole eights of the swizzle");
static_assert(SHARED_BYTES == 1024 + STAGES * STAGE_BYTES + SENT_BYTES + BARRIER_BYTES + SCALE_BYTES + PAST_BYTES,
              "the launcher's memory is not this");

// Weights and x; the other block's sums; barriers (full, empty, one for the sums); scales of x.
struct Shared {
    u32 base;

    __device__ __forceinline__ u32 weights(u32 iteration) const { return base + iteration % STAGES * STAGE_BYTES; }
    __device__ __forceinline__ u32 x(u32 iteration) const { return weights(iteration) + WEIGHT_BYTES; }
    __device__ __forceinline__ u32 sent() const { return base + STAGES * STAGE_BYTES; }
    __device__ __forceinline__ u32 barrier(int i) const { return sent() + SENT_BYTES + 8 * i; }
    __device__ __forceinline__ u32 full(u32 iteration) const { return barrier(iteration % STAGES); }
    __device__ __forceinline__ u32 empty(u32 iteration) const { return barrier(STAGES + iteration % STAGES); }
    __device__ __forceinline__ u32 all_sent() const { return barrier(2 * STAGES); }
    __device__ __forceinline__ u32 x_scales() const { return barrier(2 * STAGES + 1); }
    __device__ __forceinline__ u32 parity(u32 iteration) const { return iteration / STAGES % 2; }
};

// A block's split of K, tile after tile. Each iteration fills a stage.
struct BlockWork {
    int split, first_tile, num_tiles, first_span, num_spans;

    __device__ __forceinline__ BlockWork(int n_size, int k_size) {
        const int spans = (k_size + SPAN - 1) / SPAN, tiles = (n_size + ROWS - 1) / ROWS;
        const int step = gridDim.x / SPLIT;
        split = blockIdx.x % SPLIT;
        first_tile = blockIdx.x / SPLIT;
        num_tiles = (tiles - first_tile + step - 1) / step;
        first_span = spans * split / SPLIT;
        num_spans = spans * (split + 1) / SPLIT - first_span;
    }
    __device__ __forceinline__ u32 num_iterations() const { return num_tiles * num_spans; }
    __device__ __forceinline__ int span(u32 iteration) const { return first_span + iteration % num_spans; }
    __device__ __forceinline__ int first_row(int tile) const {
        return (first_tile + tile * (gridDim.x / SPLIT)) * ROWS;
    }
};

constexpr int BOX_ELEMENTS = 64;  // 128 bytes

struct Producer {
    const Shared& shared;
    const BlockWork& work;
    const TensorMap& weight_map;
    const TensorMap& x_map;
    u64 policy;

    __device__ __forceinline__ void fetch_weights(u32 iteration) const {
        arrive_expecting(shared.full(iteration), STAGE_BYTES);
        const int row = work.first_row(iteration / work.num_spans);
        copy_box(shared.weights(iteration), weight_map, work.span(iteration) * BOX_ELEMENTS, row, shared.full(iteration), policy);
    }
    __device__ __forceinline__ void fetch_x(u32 iteration) const {
#pragma unroll
        for (int box = 0; box < X_BOXES; ++box) {
            const int k = (work.span(iteration) * X_BOXES + box) * BOX_ELEMENTS;
            copy_box(shared.x(iteration) + box * BOX_BYTES, x_map, k, 0, shared.full(iteration));
        }
    }
    __device__ __forceinline__ void fetch_ahead() const {
        for (u32 iteration = 0; iteration < min(static_cast<u32>(AHEAD), work.num_iterations()); ++iteration)
            fetch_weights(iteration);
    }
    __device__ __forceinline__ void fetch_all() const {
        for (u32 iteration = 0; iteration < work.num_iterations(); ++iteration) {
            if (iteration >= STAGES) wait_for(shared.empty(iteration), shared.parity(iteration) ^ 1);
            if (iteration >= AHEAD) fetch_weights(iteration);
            fetch_x(iteration);
        }
    }
};

// Sums a tile over this block's split of K. Stage::multiply issues a stage's wgmmas.
template <typename Stage>
__device__ __forceinline__ void sum_tile(Sums& sum, const Shared& shared, const BlockWork& work, u32 iteration) {
    const bool arrives = threadIdx.x % WARP_SIZE == 0;
    const u32 offset = threadIdx.x / WARPGROUP_SIZE * 64 * 128;
    clear(sum);
    for (int n = 0; n < work.num_spans; ++n, ++iteration) {
        wait_for(shared.full(iteration), shared.parity(iteration));
        begin_products();
        Stage::multiply(sum, shared.weights(iteration) + offset, shared.x(iteration));
        commit_products();
        wait_for_products<1>(sum);
        if (n > 0 && arrives) arrive(shared.empty(iteration - 1));
    }
    wait_for_products<0>(sum);
    if (work.num_spans > 0 && arrives) arrive(shared.empty(iteration - 1));
}

// Sends every second chunk to the other block; stores the others.
template <typename OutputTile>
__device__ __forceinline__ void store_half(const Sums& sum, const OutputTile& output, const Shared& shared, int split) {
    const u32 mine = shared.sent() + threadIdx.x * 16;
    const u32 theirs = address_in(1 - split, mine), barrier = address_in(1 - split, shared.all_sent());
    wait_for_cluster();  // the other block's barriers exist
#pragma unroll
    for (int pair = 0; pair < CHUNKS / 2; ++pair) {
        float four[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) four[i] = split == 0 ? sum[8 * pair + 4 + i] : sum[8 * pair + i];
        send(theirs + pair * CONSUMERS * 16, four, barrier);
    }
    wait_for_sent(shared.all_sent(), 0);
#pragma unroll
    for (int pair = 0; pair < CHUNKS / 2; ++pair) {
        float four[4];
        receive(four, mine + pair * CONSUMERS * 16);
#pragma unroll
        for (int i = 0; i < 4; ++i) four[i] += split == 0 ? sum[8 * pair + i] : sum[8 * pair + 4 + i];
        output.store(2 * pair + split, four);
    }
}

template <typename OutputTile>
__device__ __forceinline__ void store(const Sums& sum, const OutputTile& output, const Shared& shared, int split) {
    if (SPLIT == 2)
        store_half(sum, output, shared, split);
    else
        store_all(sum, output);
}

// Returns whether this thread is a consumer.
__device__ __forceinline__ bool begin_block(const Shared& shared, const Producer& producer) {
    const bool is_producer = threadIdx.x == CONSUMERS;
    start_next_kernel();
    if (is_producer) {
        prefetch_map(producer.weight_map);
        prefetch_map(producer.x_map);
        make_ring_barriers(shared, CONSUMERS / WARP_SIZE);
        make_barrier(shared.all_sent(), 1);
        publish_barriers();
        if (SPLIT == 2) arrive_expecting(shared.all_sent(), SENT_BYTES);
        producer.fetch_ahead();
    }
    __syncthreads();
    if (SPLIT == 2) arrive_at_cluster();
    wait_for_previous_kernel();
    if (threadIdx.x < CONSUMERS) return true;
    if (is_producer) producer.fetch_all();
    __syncwarp();
    if (SPLIT == 2) wait_for_cluster();
    return false;
}

#if SPLIT == 2
#define SMALL_M_CLUSTER __cluster_dims__(2, 1, 1)
#else
#define SMALL_M_CLUSTER
#endif
