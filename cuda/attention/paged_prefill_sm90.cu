// paged_prefill_sm90: paged_prefill on Hopper with wgmma and TMA; 16 bits, HEAD_DIM 64 or 128.
//
//   arrays as in paged_prefill; query_map: q in boxes of 64 elements x GROUP heads x ROWS / GROUP tokens; cache_map: kv
//   (prefill_sm90.cuh); workspace: partial_sums float32 [num_ctas, 192, HEAD_DIM], partial_stats float32 [num_ctas,
//   192, 2]
//   grid (num_ctas), at most one CTA per SM, block THREADS, shared memory SHARED_BYTES
//   reference: NumpyOps.paged_prefill_attention
//   roofline: as paged_prefill; on an H200 454 / 639 / 708 TFLOP/s in bf16 at 1k / 4k / 16k
//
// Persistent CTAs take query tiles from a counter once the previous kernel has ended; the last resets it. Several CTAs
// per tile split its keys. One warp fetches; three warpgroups of 64 rows consume at their own pace: tensor cores serve
// one while others compute softmax weights. Two would be bound by L2. Three more warps widen e4m3. Keys run from last
// to first. Unknown and masked blocks are boxes outside the map; other masked values, perhaps uninitialised, are
// zeroed.
#include "attention/paged_kv.cuh"
#include "attention/prefill_sm90.cuh"
#include "common/mma.cuh"
#include "common/types.cuh"
#include "common/wgmma.cuh"

constexpr int STAGES = 2;
constexpr int NUM_CONSUMERS = 3;
constexpr int WARPGROUP_ROWS = 64;
static_assert(PADDED_ROWS == NUM_CONSUMERS * WARPGROUP_ROWS, "every row has a warpgroup");
constexpr int TAIL_BYTES = 256;
#if QUIRE_KV_FP8
#define RING_BYTES (FETCHED_STAGES * FETCHED_BYTES)
#else
#define RING_BYTES 0
#endif
static_assert(SHARED_BYTES == QUERY_BYTES + 2 * STAGES * TILE_BYTES + RING_BYTES + TAIL_BYTES,
              "the launcher's memory is not this");

// Query rows, keys, values, e4m3 ring, barriers, query tile and split.
struct Shared {
    unsigned char* base;

    __device__ __forceinline__ u32 queries() const { return shared_address(base); }
    __device__ __forceinline__ u32 keys(int stage) const { return queries() + QUERY_BYTES + stage * TILE_BYTES; }
    __device__ __forceinline__ u32 values(int stage) const { return keys(STAGES + stage); }
    __device__ __forceinline__ u32 barrier(int i) const { return keys(2 * STAGES) + RING_BYTES + 8 * i; }
    __device__ __forceinline__ u32 queries_full() const { return barrier(0); }
    __device__ __forceinline__ u32 queries_empty() const { return barrier(1); }
    __device__ __forceinline__ u32 keys_full(int stage) const { return barrier(2 + stage); }
    __device__ __forceinline__ u32 keys_empty(int stage) const { return barrier(2 + STAGES + stage); }
    __device__ __forceinline__ u32 values_full(int stage) const { return barrier(2 + 2 * STAGES + stage); }
    __device__ __forceinline__ u32 values_empty(int stage) const { return barrier(2 + 3 * STAGES + stage); }
#if QUIRE_KV_FP8
    __device__ __forceinline__ FetchedRing fetched() const { return {keys(2 * STAGES), barrier(2 + 4 * STAGES)}; }
#endif
    __device__ __forceinline__ QueryTile* query_tile() const {
        return reinterpret_cast<QueryTile*>(base + SHARED_BYTES - TAIL_BYTES / 2);
    }
    __device__ __forceinline__ volatile int* is_end() const {
        return reinterpret_cast<int*>(base + SHARED_BYTES - 4);
    }
    __device__ __forceinline__ KvSplit* split() const { return reinterpret_cast<KvSplit*>(query_tile() + 1); }
};

struct PipelineState {
    u32 count = 0;

    __device__ __forceinline__ int stage() const { return count % STAGES; }
    __device__ __forceinline__ u32 parity() const { return count / STAGES % 2; }
};

constexpr int MAX_SPLITS = 1024;

// Splits stored per query tile; the last atomicInc wraps to 0.
__device__ u32 splits_stored[MAX_SPLITS];

// Reduction of a tile's splits: each stores sums, maxima (log2) and totals, waits for the others, then reduces its
// share of the rows. All CTAs must be resident: processes sharing SMs through MPS could deadlock.
struct PartialReduction {
    float* sums;
    float2* stats;

    __device__ __forceinline__ void store_partial(const Rows& rows, const QueryTile& query_tile, const KvSplit& split,
                                                  int first_row, float scale_log2) const {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float total = sum_of_four(rows.total[h]);
            const int row = first_row + 8 * h;
            if (!query_tile.holds(row)) continue;
            const i64 at = static_cast<i64>(split.tile_index) * PADDED_ROWS + row;
            float* to = sums + at * HEAD_DIM + threadIdx.x % 4 * 2;
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 8; ++i)
                *reinterpret_cast<float2*>(to + 8 * i) =
                    make_float2(rows.sum[4 * i + 2 * h], rows.sum[4 * i + 2 * h + 1]);
            if (threadIdx.x % 4 == 0) stats[at] = make_float2(rows.maximum[h] * scale_log2, total);
        }
    }

    // Called by all `num_threads` that stored rows.
    __device__ __forceinline__ void wait_for_all(const KvSplit& split, int barrier, int num_threads) const {
        __threadfence();
        sync_named_barrier(barrier, num_threads);
        if (threadIdx.x == WARPGROUP_SIZE) {
            u32* counter = &splits_stored[split.query_tile()];
            const u32 last = split.count - 1;
            if (atomicInc(counter, last) != last)
                while (*static_cast<volatile u32*>(counter) != 0) __nanosleep(20);
            __threadfence();
        }
        sync_named_barrier(barrier, num_threads);
    }

    __device__ __forceinline__ void reduce(T* out, const QueryTile& query_tile, const KvSplit& split, int warp,
                                           int num_warps, int num_kv_heads, float value_scale) const {
        const int lane = threadIdx.x % WARP_SIZE;
        for (int row = split.index + warp * split.count; query_tile.holds(row); row += num_warps * split.count) {
            const auto at = [&](int index) {
                return static_cast<i64>(split.query_tile() + index * split.num_query_tiles) * PADDED_ROWS + row;
            };
            float maximum = minus_infinity(), total = 0.0f, sum[HEAD_DIM / WARP_SIZE] = {};
            for (int i = lane; i < split.count; i += WARP_SIZE) maximum = fmaxf(maximum, __ldcg(stats + at(i)).x);
            const float base = finite_base(warp_max(maximum));
#pragma unroll 4
            for (int i = 0; i < split.count; ++i) {
                const float2 stat = __ldcg(stats + at(i));
                const float weight = exp2_approx(stat.x - base);
                total += weight * stat.y;
#pragma unroll
                for (int j = 0; j < HEAD_DIM / WARP_SIZE; ++j)
                    sum[j] += weight * __ldcg(sums + at(i) * HEAD_DIM + lane + j * WARP_SIZE);
            }
            const float scale = reciprocal_or_zero(total) * value_scale;
            T* to = out + query_tile.head(row, num_kv_heads) * HEAD_DIM + lane;
#pragma unroll
            for (int j = 0; j < HEAD_DIM / WARP_SIZE; ++j) to[j * WARP_SIZE] = from_float<T>(sum[j] * scale);
        }
    }
};

constexpr int THREADS = (NUM_CONSUMERS + 1) * WARPGROUP_SIZE;
constexpr int CONSUMER_WARPS = NUM_CONSUMERS * WARPGROUP_SIZE / WARP_SIZE;
constexpr int FIRST_CONSUMER_BARRIER = 1;  // one per consumer, then one for all
constexpr int ALL_CONSUMERS_BARRIER = FIRST_CONSUMER_BARRIER + NUM_CONSUMERS;
static_assert(QUIRE_DTYPE != 0 && (HEAD_DIM == 64 || HEAD_DIM == 128), "fp16 or bf16, rows of 128 or 256 bytes");

__device__ u32 num_taken;  // tiles beyond each CTA's first
constexpr u32 NONE_TAKEN = ~0u;

__device__ __forceinline__ int next_tile_index(u32& taken) {
    if (threadIdx.x % WARP_SIZE == 0) taken = atomicAdd(&num_taken, 1u);
    taken = __shfl_sync(FULL_WARP, taken, 0);
    return gridDim.x + taken;
}

__device__ __forceinline__ void produce(const Shared& shared, const TensorMap& query_map, const TensorMap& cache_map,
                                        const Batch& batch, const Pool& pool, const int* block_tables) {
    const int lane = threadIdx.x % WARP_SIZE;
    int tile_index = blockIdx.x;
    u32 taken = NONE_TAKEN;
#if QUIRE_KV_FP8
    FetchedRing ring = shared.fetched();
#else
    PipelineState pipeline;
#endif
    for (u32 round = 0;;) {
        QueryTile query_tile;
        KvSplit split;
        int num_indices = 0;
        const int sequence = batch.find(query_tile, split, tile_index,
                                        num_indices);  // reads nothing that a kernel of a graph writes
        wait_for_previous_kernel();
        const bool is_end = query_tile.first_row >= query_tile.num_rows;
        if (!is_end && !split.exists()) {
            tile_index = next_tile_index(taken);
            continue;
        }
#if QUIRE_KV_FP8
        // Queries wait until the previous tile's have been read; the first keys and values need not.
        const int first_tile = query_tile.first_key_tile(), end_tile = first_tile + query_tile.num_key_tiles();
        const int* own_table = block_tables + static_cast<i64>(is_end ? 0 : sequence) * batch.max_blocks;
        const auto fetch_next = [&](int tile) {
            const int box = tile * NUM_IDS + lane;
            const bool is_visible = box * BLOCK_KEYS >= query_tile.first_key / BLOCK_KEYS * BLOCK_KEYS &&
                                    box * BLOCK_KEYS < query_tile.end_key;
            const int id = is_visible ? own_table[box * BLOCK_KEYS / BLOCK_SIZE] : -1;
            const int row = pool.row(id, query_tile.kv_head, box * BLOCK_KEYS);
            fetch_bytes(ring, cache_map, row);
            fetch_bytes(ring, cache_map, row < pool.num_blocks * pool.block_rows ? row + pool.value_rows : row);
        };
        if (!is_end && end_tile > first_tile) fetch_next(end_tile - 1);
#endif
        wait_for(shared.queries_empty(), (round + 1) % 2);
        if (lane == 0) *shared.query_tile() = query_tile;
        if (is_end) {
            if (lane == 0) arrive(shared.queries_full());
#if QUIRE_KV_FP8
            wait_for(ring.empty(), ring.parity ^ 1);
            if (lane == 0) *shared.is_end() = 1, arrive(ring.full());
#endif
            // Every CTA takes one index past the end, so num_indices are taken in all.
            if (lane == 0 && taken == static_cast<u32>(num_indices) - 1) atomicExch(&num_taken, 0u);
            return;
        }
        if (lane == 0) {
            *shared.split() = split;
            arrive_expecting(shared.queries_full(), COLUMNS * ROWS * 128);
            for (int column = 0; column < COLUMNS; ++column)
                copy_box(shared.queries() + column * QUERY_COLUMN_BYTES, query_map, column * 64,
                         query_tile.kv_head * GROUP, query_tile.start + query_tile.first_row / GROUP,
                         shared.queries_full());
        }
#if QUIRE_KV_FP8
        for (int tile = end_tile - 2; tile >= first_tile; --tile) fetch_next(tile);
#else
        const int* table = block_tables + static_cast<i64>(sequence) * batch.max_blocks;
        const int first_block = query_tile.first_key / BLOCK_KEYS, end_block = ceil_div(query_tile.end_key, BLOCK_KEYS);
        for (int tile = query_tile.first_key_tile() + query_tile.num_key_tiles() - 1;
             tile >= query_tile.first_key_tile(); --tile, ++pipeline.count) {
            const int box = tile * NUM_IDS + lane;
            const bool is_visible = box >= first_block && box < end_block;
            const int id = is_visible ? table[box * BLOCK_KEYS / BLOCK_SIZE] : -1;
            const int row = pool.row(id, query_tile.kv_head, box * BLOCK_KEYS);
            const int value_row = row < pool.num_blocks * pool.block_rows ? row + pool.value_rows : row;
            const int stage = pipeline.stage();
            wait_for(shared.keys_empty(stage), pipeline.parity() ^ 1);
            fetch_tile(shared.keys(stage), cache_map, row, shared.keys_full(stage));
            wait_for(shared.values_empty(stage), pipeline.parity() ^ 1);
            fetch_tile(shared.values(stage), cache_map, value_row, shared.values_full(stage));
        }
#endif
        tile_index = next_tile_index(taken);
        ++round;
    }
}

#if QUIRE_KV_FP8
__device__ __forceinline__ void widen_tiles(const Shared& shared, u32 warp) {
    FetchedRing ring = shared.fetched();
    for (PipelineState pipeline;; ++pipeline.count) {
        const int stage = pipeline.stage();
        const u32 parity = pipeline.parity() ^ 1;
        wait_for(ring.full(), ring.parity);
        if (*shared.is_end()) return;
        widen_tile(ring, shared.keys(stage), shared.keys_empty(stage), parity, shared.keys_full(stage), warp);
        widen_tile(ring, shared.values(stage), shared.values_empty(stage), parity, shared.values_full(stage), warp);
    }
}
#endif

__device__ __forceinline__ void start_scores(float (&score)[KEYS / 2], u32 queries, u32 keys) {
    const u64 a = operand(queries, 0), b = operand(keys, 0);
    multiply<0>(score, a, b);
#pragma unroll
    for (int k = 1; k < HEAD_DIM / 16; ++k)
        multiply<1>(score, a + (k / 4 * QUERY_COLUMN_BYTES + k % 4 * 32) / 16,
                    b + (k / 4 * KEY_COLUMN_BYTES + k % 4 * 32) / 16);
    commit_products();
}

// True if a block of the tile has keys masked for the whole query tile.
__device__ __forceinline__ bool is_cut(const QueryTile& query_tile, int tile) {
    const int begin = tile * KEYS;
    return (query_tile.first_key > begin && query_tile.first_key % BLOCK_KEYS != 0) ||
           (query_tile.end_key < begin + KEYS && query_tile.end_key % BLOCK_KEYS != 0);
}

// Each warpgroup zeros the values for itself.
__device__ __forceinline__ void clear_masked_values(u32 values, const QueryTile& query_tile, int tile, int consumer) {
    for (int i = threadIdx.x % WARPGROUP_SIZE; i < KEYS * COLUMNS * 8; i += WARPGROUP_SIZE) {
        const int key = tile * KEYS + i / 8 % KEYS;
        if (key >= query_tile.first_key && key < query_tile.end_key) continue;
        asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" : : "r"(values + i * 16), "r"(0) : "memory");
    }
    publish_stores();
    sync_named_barrier(FIRST_CONSUMER_BARRIER + consumer, WARPGROUP_SIZE);
}

struct Consumer {
    const Shared& shared;
    int index;
    int first_row;  // this thread's row of half 0
    float scale_log2;
    int window;
    PipelineState pipeline;

    __device__ __forceinline__ u32 queries() const { return shared.queries() + index * WARPGROUP_ROWS * 128; }

    __device__ __forceinline__ void weigh(Rows& rows, float (&score)[KEYS / 2], const QueryTile& query_tile,
                                          int tile) const {
        const int first = query_tile.first_row + index * WARPGROUP_ROWS, begin = tile * KEYS;
        const bool all_visible = begin + KEYS - 1 <= query_tile.position(first) &&
                              begin > query_tile.position(first + WARPGROUP_ROWS - 1) - window;
        if (!all_visible) {
            const int row = query_tile.first_row + first_row;
            const int last_visible[2] = {query_tile.position(row) - begin, query_tile.position(row + 8) - begin};
            const int num_visible[2] = {window, window};
            mask_tile(score, last_visible, num_visible);
        }
        weigh_tile(rows, score, scale_log2);
    }

    __device__ __forceinline__ void attend(Rows& rows, const QueryTile& query_tile) {
        const int first_key_tile = query_tile.first_key_tile();
        int tile = first_key_tile + query_tile.num_key_tiles() - 1;
        if (tile < first_key_tile) return release(shared.queries_empty());
#if SCALES_QUERIES
        scale_log2 *= scale_own_queries(shared.queries(), query_tile, first_row / 16 * 16);
        sync_named_barrier(FIRST_CONSUMER_BARRIER + index, WARPGROUP_SIZE);
#endif
        for (; tile >= first_key_tile; --tile, ++pipeline.count) {
            const int stage = pipeline.stage();
            float score[KEYS / 2];
            wait_for(shared.keys_full(stage), pipeline.parity());
            begin_products();
            start_scores(score, queries(), shared.keys(stage));
            wait_for_products<0>(score);
            release(shared.keys_empty(stage));
            if (tile == first_key_tile) release(shared.queries_empty());
            weigh(rows, score, query_tile, tile);
            u32 weights[KEYS / 16][4];
            pack_weights(weights, score);
            wait_for(shared.values_full(stage), pipeline.parity());
            if (is_cut(query_tile, tile)) clear_masked_values(shared.values(stage), query_tile, tile, index);
            begin_products();
            start_values(rows, weights, shared.values(stage));
            wait_for_products<0>(rows.sum);
            release(shared.values_empty(stage));
        }
    }
};

__device__ __forceinline__ void consume(const Shared& shared, T* out, const PartialReduction& reduction,
                                        int num_kv_heads, const KvScales& scales, float scale_log2, int window) {
    const int index = threadIdx.x / WARPGROUP_SIZE - 1, lane = threadIdx.x % WARP_SIZE;
    const int warp = threadIdx.x / WARP_SIZE - WARPGROUP_SIZE / WARP_SIZE;
    Consumer consumer = {shared, index, warp * 16 + lane / 4, scale_log2, window, {}};
    for (u32 round = 0;; ++round) {
        wait_for(shared.queries_full(), round % 2);
        const QueryTile query_tile = *shared.query_tile();
        if (query_tile.first_row >= query_tile.num_rows) return;
        consumer.scale_log2 = scale_log2 * scales.key(query_tile.kv_head);
        Rows rows;
        consumer.attend(rows, query_tile);
        const float value_scale = scales.value(query_tile.kv_head);  // loaded late to save registers
        // A CTA with a split has no other tile, so reducing here costs the loop no registers.
        if (shared.split()->count > 1) {
            const KvSplit split = *shared.split();
            reduction.store_partial(rows, query_tile, split, consumer.first_row, consumer.scale_log2);
            reduction.wait_for_all(split, ALL_CONSUMERS_BARRIER, NUM_CONSUMERS * WARPGROUP_SIZE);
            reduction.reduce(out, query_tile, split, warp, CONSUMER_WARPS, num_kv_heads, value_scale);
            return;
        }
        store_rows(rows, out, query_tile, consumer.first_row, num_kv_heads, value_scale);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
paged_prefill_sm90(T* __restrict__ out, const __grid_constant__ TensorMap query_map,
                             const __grid_constant__ TensorMap cache_map, const int* __restrict__ block_tables,
                             const int* __restrict__ context_lens, const int* __restrict__ query_start,
                             float* __restrict__ partial_sums, float2* __restrict__ partial_stats, int num_sequences,
                             int num_kv_heads, int num_blocks, int num_layers, int layer, int max_blocks,
                             float scale_log2, int window, const float* kv_scales) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const Shared shared{memory};
    start_next_kernel();
    if (threadIdx.x == 0) {
        make_barrier(shared.queries_full(), 1);
        make_barrier(shared.queries_empty(), CONSUMER_WARPS);
#if QUIRE_KV_FP8
        *shared.is_end() = 0;
        shared.fetched().make_barriers();
#endif
        for (int stage = 0; stage < STAGES; ++stage) {
            make_barrier(shared.keys_full(stage), TILE_ARRIVALS);
            make_barrier(shared.values_full(stage), TILE_ARRIVALS);
            make_barrier(shared.keys_empty(stage), CONSUMER_WARPS);
            make_barrier(shared.values_empty(stage), CONSUMER_WARPS);
        }
        publish_barriers();
    }
    __syncthreads();
    if (threadIdx.x < WARPGROUP_SIZE) {
        give_up_registers<32>();
#if QUIRE_KV_FP8
        if (threadIdx.x >= WARP_SIZE) return widen_tiles(shared, threadIdx.x / WARP_SIZE - 1);
#else
        if (threadIdx.x >= WARP_SIZE) return;
#endif
        const Batch batch = {context_lens, query_start, num_sequences, num_kv_heads, max_blocks, window};
        produce(shared, query_map, cache_map, batch, Pool(num_blocks, num_layers, layer, num_kv_heads), block_tables);
    } else {
        take_registers<160>();
        consume(shared, out, PartialReduction{partial_sums, partial_stats}, num_kv_heads,
                KvScales(kv_scales, layer, num_kv_heads), scale_log2, window);
    }
}
