// paged_prefill_short_sm90: paged_prefill_sm90 with split-KV, for too few query tiles to fill the device.
//
//   arrays as in paged_prefill, maps as in paged_prefill_sm90; STAGES and the macros of prefill_sm90.cuh
//   grid (num_clusters * cluster_size), clusters of up to MAX_CLUSTER_SPLITS, block THREADS, shared memory SHARED_BYTES
//   reference: NumpyOps.paged_prefill_attention
//   roofline: bytes of visible keys and values: 2 of the 12 us for 64 tokens after 2,048 on an H200
//
// The CTAs of a cluster split a query tile's keys and reduce its rows in distributed shared memory. One warp fetches,
// two warpgroups of 64 rows consume, three warps widen e4m3. A tile's scores overlap the previous tile's values. Keys
// run from first to last. Values outside the split, perhaps uninitialised, are zeroed.
#include "attention/paged_kv.cuh"
#include "attention/prefill_sm90.cuh"
#include "common/mma.cuh"
#include "common/types.cuh"
#include "common/wgmma.cuh"

constexpr int MIN_SPLIT_KEYS = 128;

// a / b up to a million, five times as fast as integer division.
__device__ __forceinline__ int quotient(int a, int b) { return static_cast<int>(__fdividef(a + 0.5f, b)); }

// A CTA's work in a round: key tiles of a query tile from `begin` on. A cluster splits one query tile; with more tiles
// than clusters its CTAs share several, or take whole ones.
struct Task {
    QueryTile query_tile;
    int sequence;  // num_sequences: no work
    int index, count;
    int begin;

    __device__ __forceinline__ int num_tiles() const { return max(0, ceil_div(query_tile.end_key - begin, KEYS)); }

    __device__ __forceinline__ void take_split(int nothing) {
        const int first = query_tile.first_key / BLOCK_KEYS,
                  num_boxes = max(0, ceil_div(query_tile.end_key, BLOCK_KEYS) - first);
        count = min(count, max(1, num_boxes * BLOCK_KEYS / MIN_SPLIT_KEYS));
        if (index >= count) sequence = nothing;
        begin = (first + quotient(index * num_boxes, count)) * BLOCK_KEYS;
        query_tile.first_key = max(query_tile.first_key, begin);
        query_tile.end_key = min(query_tile.end_key, (first + quotient((index + 1) * num_boxes, count)) * BLOCK_KEYS);
    }
};

// 32 sequences, one per lane. `end`: query tiles per kv head through the lane's.
struct Chunks {
    int start, num_tokens, context_len, end, total;

    __device__ __forceinline__ void load(const Batch& batch, int first) {
        const int lane = threadIdx.x % WARP_SIZE, sequence = first + lane;
        start = num_tokens = context_len = 0;
        if (sequence < batch.num_sequences) {
            start = batch.query_start[sequence];
            num_tokens = max(0, batch.query_start[sequence + 1] - start);
            context_len = batch.context_lens[sequence];
        }
        end = ceil_div(num_tokens * GROUP, ROWS);
#pragma unroll
        for (int offset = 1; offset < WARP_SIZE; offset *= 2) {
            const int left = __shfl_up_sync(FULL_WARP, end, offset);
            if (lane >= offset) end += left;
        }
        total = __shfl_sync(FULL_WARP, end, WARP_SIZE - 1);
    }
};

// Called by a whole warp; its loads are independent.
__device__ __forceinline__ Task find_task(const Batch& batch, int cluster_size, int round) {
    Task task;
    task.sequence = batch.num_sequences;
    Chunks chunks;
    int num_query_tiles = 0;
    for (int first = 0; first < batch.num_sequences; first += WARP_SIZE) {
        chunks.load(batch, first);
        num_query_tiles += chunks.total;
    }
    num_query_tiles *= batch.num_kv_heads;

    const int cluster = quotient(blockIdx.x, cluster_size), rank = blockIdx.x - cluster * cluster_size;
    const int num_clusters = quotient(gridDim.x, cluster_size);
    const int share = max(1, quotient(num_query_tiles + num_clusters - 1, num_clusters));
    task.count = max(1, quotient(cluster_size, share));
    const int of_cluster = quotient(rank, task.count);
    task.index = rank - of_cluster * task.count;
    const int tile_index = task.count == 1 ? blockIdx.x + round * gridDim.x : cluster * share + of_cluster;
    const bool exists = task.count == 1 || (round == 0 && of_cluster < share);
    if (!exists || tile_index >= num_query_tiles) return task;

    const int wanted = quotient(tile_index, batch.num_kv_heads);
    int first = 0, before = 0;
    for (;; first += WARP_SIZE) {
        if (batch.num_sequences > WARP_SIZE) chunks.load(batch, first);
        if (before + chunks.total > wanted) break;
        before += chunks.total;
    }
    const int owner = __ffs(__ballot_sync(FULL_WARP, before + chunks.end > wanted)) - 1;
    const int from_end = before + __shfl_sync(FULL_WARP, chunks.end, owner) - 1 - wanted;
    const int start = __shfl_sync(FULL_WARP, chunks.start, owner);
    const int num_tokens = __shfl_sync(FULL_WARP, chunks.num_tokens, owner);
    task.sequence = first + owner;
    const int context_len = __shfl_sync(FULL_WARP, chunks.context_len, owner);
    batch.describe(task.query_tile, {start, num_tokens, context_len}, tile_index - wanted * batch.num_kv_heads,
                   from_end * ROWS);
    task.take_split(batch.num_sequences);
    return task;
}

constexpr int CONSUMERS = 2;
constexpr int CONSUMER_THREADS = CONSUMERS * WARPGROUP_SIZE;
constexpr int CONSUMER_WARPS = CONSUMER_THREADS / WARP_SIZE;
constexpr int THREADS = CONSUMER_THREADS + WARPGROUP_SIZE;
static_assert(PADDED_ROWS == CONSUMERS * 64, "every row has a warpgroup");

constexpr int MAX_CLUSTER_SPLITS = 8;  // the portable cluster size
constexpr int CHUNKS = HEAD_DIM / 16;
constexpr int UNIT_BYTES = WARP_SIZE * 16;
constexpr int STAT_BYTES = 8 * 16;  // maximum and total of rows r and r + 8 of a warp
constexpr int MAX_UNITS = CONSUMER_WARPS * CHUNKS + MAX_CLUSTER_SPLITS;
constexpr int REDUCTION_BYTES = MAX_UNITS * UNIT_BYTES + MAX_CLUSTER_SPLITS * CONSUMER_WARPS * STAT_BYTES;

// Cluster reduction of a tile's splits, weighted by total * 2^(maximum - largest). CTAs exchange the units they reduce.
//
// A unit is 16 columns of a warp's 16 rows, 16 bytes per lane, normalised to 16 bits: SM-to-SM bandwidth is low. Unit i
// * num_warps + w is column chunk i of warp w; split u % count reduces unit u. Receivers hold units by split, then
// stats.
struct PartialReduction {
    u32 base, barrier;
    int first_rank;
    int index, count, num_warps;
    int inverse;  // 4096 / count + 1

    __device__ __forceinline__ u32 unit(int slot, int split) const {
        return base + (slot * count + split) * UNIT_BYTES;
    }
    __device__ __forceinline__ u32 stats(int split, int warp) const {
        return base + MAX_UNITS * UNIT_BYTES + (split * CONSUMER_WARPS + warp) * STAT_BYTES;
    }
    __device__ __forceinline__ int slot(int unit) const { return unit * inverse >> 12; }  // unit / count
    __device__ __forceinline__ int owner(int unit) const { return unit - slot(unit) * count; }
    __device__ __forceinline__ int num_slots() const { return slot(num_warps * CHUNKS + count - 1 - index); }

    // Called first, by one thread.
    __device__ __forceinline__ void expect_partials() const {
        arrive_expecting(barrier, count * (num_slots() * UNIT_BYTES + num_warps * STAT_BYTES));
    }

    __device__ __forceinline__ void send_partial(const Rows& rows, int warp, float scale_log2) const {
        const int lane = threadIdx.x % WARP_SIZE;
        const float total[2] = {sum_of_four(rows.total[0]), sum_of_four(rows.total[1])};
        const float stat[4] = {rows.maximum[0] * scale_log2, total[0], rows.maximum[1] * scale_log2, total[1]};
        if (warp >= num_warps) return;
        for (int to = lane % 4; to < count; to += 4)
            send(address_in(first_rank + to, stats(index, warp) + lane / 4 * 16), stat,
                 address_in(first_rank + to, barrier));
        const float by[2] = {reciprocal_or_zero(total[0]), reciprocal_or_zero(total[1])};
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) {
            float four[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int at = 8 * i + 2 * j;
                four[j] = __uint_as_float(pack_pair(rows.sum[at] * by[j % 2], rows.sum[at + 1] * by[j % 2]));
            }
            const int u = i * num_warps + warp, to = first_rank + owner(u);
            send(address_in(to, unit(slot(u), index) + lane * 16), four, address_in(to, barrier));
        }
    }

    // One unit per warp, after all have arrived.
    __device__ __forceinline__ void reduce(T* out, const QueryTile& query_tile, int warp, int num_kv_heads,
                                           float value_scale) const {
        const int lane = threadIdx.x % WARP_SIZE, slots = num_slots();
        for (int s = warp; s < slots; s += CONSUMER_WARPS) {
            const int u = s * count + index, chunk = u / num_warps, of = u - chunk * num_warps;
            float weight[MAX_CLUSTER_SPLITS][4], top[2] = {minus_infinity(), minus_infinity()};
#pragma unroll
            for (int split = 0; split < MAX_CLUSTER_SPLITS; ++split) {
                if (split >= count) break;
                receive(weight[split], stats(split, of) + lane / 4 * 16);
                top[0] = fmaxf(top[0], weight[split][0]);
                top[1] = fmaxf(top[1], weight[split][2]);
            }
            const float base[2] = {finite_base(top[0]), finite_base(top[1])};
            float total[2] = {}, sum[2][4] = {};
#pragma unroll
            for (int split = 0; split < MAX_CLUSTER_SPLITS; ++split) {
                if (split >= count) break;
                float four[4];
                receive(four, unit(s, split) + lane * 16);
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float by = weight[split][2 * h + 1] * exp2_approx(weight[split][2 * h] - base[h]);
                    total[h] += by;
#pragma unroll
                    for (int n = 0; n < 2; ++n) {
                        const float2 pair = unpack_pair(__float_as_uint(four[2 * n + h]));
                        sum[n][2 * h] = fmaf(by, pair.x, sum[n][2 * h]);
                        sum[n][2 * h + 1] = fmaf(by, pair.y, sum[n][2 * h + 1]);
                    }
                }
            }
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int row = of * 16 + lane / 4 + 8 * h;
                if (!query_tile.holds(row)) continue;
                const float scale = reciprocal_or_zero(total[h]) * value_scale;
                T* to = out + query_tile.head(row, num_kv_heads) * HEAD_DIM + chunk * 16 + lane % 4 * 2;
#pragma unroll
                for (int n = 0; n < 2; ++n)
                    *reinterpret_cast<u32*>(to + 8 * n) = pack_pair(sum[n][2 * h] * scale, sum[n][2 * h + 1] * scale);
            }
        }
    }
};

constexpr int BARRIER_BYTES = 8 * (3 + 4 * STAGES);
static_assert(QUIRE_DTYPE != 0 && (HEAD_DIM == 64 || HEAD_DIM == 128), "fp16 or bf16, rows of 128 or 256 bytes");
static_assert(REDUCTION_BYTES <= QUERY_BYTES + STAGES * TILE_BYTES, "partial results replace queries and keys");
#if QUIRE_KV_FP8
#define RING_BYTES (FETCHED_STAGES * FETCHED_BYTES)
#define RING_BARRIER_BYTES (16 * FETCHED_STAGES)
#else
#define RING_BYTES 0
#define RING_BARRIER_BYTES 0
#endif
static_assert(SHARED_BYTES ==
                  1024 + QUERY_BYTES + 2 * STAGES * TILE_BYTES + RING_BYTES + BARRIER_BYTES + RING_BARRIER_BYTES,
              "the launcher's memory is not this");

// Query rows and keys (later partial results), values, e4m3 ring, barriers.
struct Shared {
    u32 base;

    __device__ __forceinline__ u32 queries() const { return base; }
    __device__ __forceinline__ u32 keys(int stage) const { return base + QUERY_BYTES + stage * TILE_BYTES; }
    __device__ __forceinline__ u32 values(int stage) const { return keys(STAGES + stage); }
    __device__ __forceinline__ u32 barrier(int i) const { return values(STAGES) + RING_BYTES + 8 * i; }
#if QUIRE_KV_FP8
    __device__ __forceinline__ FetchedRing fetched() const { return {values(STAGES), barrier(3 + 4 * STAGES)}; }
#endif
    __device__ __forceinline__ u32 queries_full() const { return barrier(0); }
    __device__ __forceinline__ u32 queries_empty() const { return barrier(1); }
    __device__ __forceinline__ u32 all_sent() const { return barrier(2); }
    __device__ __forceinline__ u32 keys_full(int stage) const { return barrier(3 + stage); }
    __device__ __forceinline__ u32 keys_empty(int stage) const { return barrier(3 + STAGES + stage); }
    __device__ __forceinline__ u32 values_full(int stage) const { return barrier(3 + 2 * STAGES + stage); }
    __device__ __forceinline__ u32 values_empty(int stage) const { return barrier(3 + 3 * STAGES + stage); }
};

struct PipelineState {
    u32 count = 0;

    __device__ __forceinline__ int stage() const { return count % STAGES; }
    __device__ __forceinline__ u32 parity() const { return count / STAGES % 2; }
};

// Lanes hold the block ids of the next WARP_SIZE boxes.
struct Producer {
    const Shared& shared;
    const TensorMap& query_map;
    const TensorMap& cache_map;
    const Pool pool;
    int cluster_size;
    const int* table;
    int ids;
#if QUIRE_KV_FP8
    FetchedRing ring;
#else
    PipelineState pipeline;
#endif

    __device__ __forceinline__ int row_of(const Task& task, int tile, bool is_value) {
        const int lane = threadIdx.x % WARP_SIZE, in_ids = tile * NUM_IDS % WARP_SIZE;
        if (in_ids == 0 && !is_value) {
            const int key = task.begin + tile * KEYS + lane * BLOCK_KEYS;
            ids = key < task.query_tile.end_key ? table[key / BLOCK_SIZE] : -1;
        }
        const int id = __shfl_sync(FULL_WARP, ids, in_ids + lane % NUM_IDS);
        const int row = pool.row(id, task.query_tile.kv_head, task.begin + tile * KEYS + lane * BLOCK_KEYS);
        return is_value && row < pool.num_blocks * pool.block_rows ? row + pool.value_rows : row;
    }

#if QUIRE_KV_FP8
    __device__ __forceinline__ void fetch(const Task& task, int tile) {
        fetch_bytes(ring, cache_map, row_of(task, tile, false));
        fetch_bytes(ring, cache_map, row_of(task, tile, true));
    }
#else
    __device__ __forceinline__ void fetch(const Task& task, int tile) {
        fetch_keys(task, tile);
        fetch_values(task, tile);
        ++pipeline.count;
    }

    __device__ __forceinline__ void fetch_keys(const Task& task, int tile) {
        const int row = row_of(task, tile, false), stage = pipeline.stage();
        wait_for(shared.keys_empty(stage), pipeline.parity() ^ 1);
        fetch_tile(shared.keys(stage), cache_map, row, shared.keys_full(stage));
    }

    __device__ __forceinline__ void fetch_values(const Task& task, int tile) {
        const int row = row_of(task, tile, true), stage = pipeline.stage();
        wait_for(shared.values_empty(stage), pipeline.parity() ^ 1);
        fetch_tile(shared.values(stage), cache_map, row, shared.values_full(stage));
    }
#endif

    __device__ __forceinline__ void fetch_queries(const QueryTile& query_tile, int round) const {
        wait_for(shared.queries_empty(), (round + 1) % 2);
        if (threadIdx.x % WARP_SIZE != 0) return;
        arrive_expecting(shared.queries_full(), COLUMNS * ROWS * 128);
        for (int column = 0; column < COLUMNS; ++column)
            copy_box(shared.queries() + column * QUERY_COLUMN_BYTES, query_map, column * 64, query_tile.kv_head * GROUP,
                     query_tile.start + query_tile.first_row / GROUP, shared.queries_full());
    }

    __device__ __forceinline__ void produce(const Batch& batch, const int* block_tables) {
        for (int round = 0;; ++round) {
            const Task task = find_task(batch, cluster_size, round);
            const bool is_end = task.sequence == batch.num_sequences;
            table = block_tables + static_cast<i64>(is_end ? 0 : task.sequence) * batch.max_blocks;
            const int num_tiles = is_end ? 0 : task.num_tiles();
            if (round == 0) wait_for_previous_kernel();
            if (is_end) return;
            fetch_queries(task.query_tile, round);
            for (int tile = 0; tile < num_tiles; ++tile) fetch(task, tile);
        }
    }
};

#if QUIRE_KV_FP8
__device__ __forceinline__ void widen_tiles(const Shared& shared, const Batch& batch, int cluster_size, int warp) {
    FetchedRing ring = shared.fetched();
    PipelineState pipeline;
    for (int round = 0;; ++round) {
        const Task task = find_task(batch, cluster_size, round);
        if (task.sequence == batch.num_sequences) return;
        for (int tile = 0; tile < task.num_tiles(); ++tile, ++pipeline.count) {
            const int stage = pipeline.stage();
            const u32 parity = pipeline.parity() ^ 1;
            widen_tile(ring, shared.keys(stage), shared.keys_empty(stage), parity, shared.keys_full(stage), warp);
            widen_tile(ring, shared.values(stage), shared.values_empty(stage), parity, shared.values_full(stage), warp);
        }
    }
}
#endif

__device__ __forceinline__ void start_scores(float (&score)[KEYS / 2], u32 queries, u32 keys) {
    const u64 a = operand(queries, 0), b = operand(keys, 0);
#pragma unroll
    for (int i = 0; i < KEYS / 2; ++i) score[i] = 0.0f;
    begin_products();
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; ++k)
        multiply_add(score, a + (k / 4 * QUERY_COLUMN_BYTES + k % 4 * 32) / 16,
                     b + (k / 4 * KEY_COLUMN_BYTES + k % 4 * 32) / 16);
    commit_products();
}

struct Consumer {
    const Shared& shared;
    int index;
    int first_row;  // this thread's row of half 0
    int cluster_size;
    float scale_log2;
    int window;
    PipelineState pipeline;

    __device__ __forceinline__ u32 queries() const { return shared.queries() + index * 64 * 128; }

    __device__ __forceinline__ void start_tile(float (&score)[KEYS / 2]) const {
        wait_for(shared.keys_full(pipeline.stage()), pipeline.parity());
        start_scores(score, queries(), shared.keys(pipeline.stage()));
    }

    __device__ __forceinline__ void start_sums(Rows& rows, const u32 (&weights)[KEYS / 16][4], const Task& task,
                                               int tile, const PipelineState& of) const {
        wait_for(shared.values_full(of.stage()), of.parity());
        clear_masked_values(task, tile, shared.values(of.stage()));
        begin_products();
        start_values(rows, weights, shared.values(of.stage()));
    }

    __device__ __forceinline__ void release_keys(const Task& task, int tile) const {
        release(shared.keys_empty(pipeline.stage()));
        if (tile + 1 == task.num_tiles()) release_queries(task);
    }

    // Each warpgroup zeros for itself the values masked for the whole split.
    __device__ __forceinline__ void clear_masked_values(const Task& task, int tile, u32 values) const {
        const int begin = task.begin + tile * KEYS;
        const bool is_partly_masked =
            (task.query_tile.first_key > begin && task.query_tile.first_key % BLOCK_KEYS != 0) ||
            (task.query_tile.end_key < begin + KEYS && task.query_tile.end_key % BLOCK_KEYS != 0);
        if (!is_partly_masked) return;
        for (int i = threadIdx.x % WARPGROUP_SIZE; i < KEYS * COLUMNS * 8; i += WARPGROUP_SIZE) {
            const int key = begin + i / 8 % KEYS;
            if (key >= task.query_tile.first_key && key < task.query_tile.end_key) continue;
            asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};"
                         :
                         : "r"(values + i * 16), "r"(0)
                         : "memory");
        }
        publish_stores();
        sync_named_barrier(1 + index, WARPGROUP_SIZE);
    }

    __device__ __forceinline__ void weigh(Rows& rows, float (&correction)[2], float (&score)[KEYS / 2],
                                          const Task& task, int tile) const {
        const QueryTile& query_tile = task.query_tile;
        const int first = query_tile.first_row + index * 64, begin = task.begin + tile * KEYS;
        const bool all_visible = begin + KEYS - 1 <= query_tile.position(first) && begin + KEYS <= query_tile.end_key &&
                              begin > query_tile.position(first + 63) - window;
        if (!all_visible) {
            const int row = query_tile.first_row + first_row, last = query_tile.end_key - 1;
            const int at[2] = {query_tile.position(row), query_tile.position(row + 8)};
            const int last_visible[2] = {min(at[0], last) - begin, min(at[1], last) - begin};
            const int num_visible[2] = {max(0, window - max(0, at[0] - last)), max(0, window - max(0, at[1] - last))};
            mask_tile(score, last_visible, num_visible);
        }
        weigh_scores(rows, correction, score, scale_log2);
    }

    __device__ __forceinline__ void release_queries(const Task& task) const {
        release(shared.queries_empty());
        if (task.count > 1) arrive_at_cluster();
    }

    __device__ __forceinline__ void skip(const Task& task) {
        for (int tile = 0; tile < task.num_tiles(); ++tile, ++pipeline.count) {
            wait_for(shared.keys_full(pipeline.stage()), pipeline.parity());
            release(shared.keys_empty(pipeline.stage()));
            wait_for(shared.values_full(pipeline.stage()), pipeline.parity());
            release(shared.values_empty(pipeline.stage()));
        }
        release_queries(task);
    }

    __device__ __forceinline__ void attend(Rows& rows, const Task& task) {
        const int num_tiles = task.num_tiles();
        if (num_tiles == 0 || !task.query_tile.holds(index * 64)) return skip(task);
#if SCALES_QUERIES
        scale_log2 *= scale_own_queries(shared.queries(), task.query_tile, first_row / 16 * 16);
        sync_named_barrier(1 + index, WARPGROUP_SIZE);
#endif
        float score[KEYS / 2], correction[2];
        u32 weights[KEYS / 16][4];
        start_tile(score);
        wait_for_products<0>(score);
        release_keys(task, 0);
        weigh(rows, correction, score, task, 0);
        pack_weights(weights, score);
        for (int tile = 0; tile + 1 < num_tiles; ++tile) {
            const PipelineState now = pipeline;
            ++pipeline.count;
            start_tile(score);
            start_sums(rows, weights, task, tile, now);
            wait_for_products<1>(score);
            release_keys(task, tile + 1);
            weigh(rows, correction, score, task, tile + 1);
            wait_for_products<0>(rows.sum);
            release(shared.values_empty(now.stage()));
            rescale_sums(rows, correction);
            pack_weights(weights, score);
        }
        start_sums(rows, weights, task, num_tiles - 1, pipeline);
        wait_for_products<0>(rows.sum);
        release(shared.values_empty(pipeline.stage()));
        ++pipeline.count;
    }

    __device__ __forceinline__ void consume(const Batch& batch, T* out, const KvScales& scales) {
        const float scale_of_scores = scale_log2;
        const int warp = threadIdx.x / WARP_SIZE;
        for (int round = 0;; ++round) {
            const Task task = find_task(batch, cluster_size, round);
            if (task.sequence == batch.num_sequences) return;
            const int first_rank = blockIdx.x - quotient(blockIdx.x, cluster_size) * cluster_size - task.index;
            const int num_rows = min(ROWS, task.query_tile.num_rows - task.query_tile.first_row);
            const PartialReduction reduction = {shared.base, shared.all_sent(), first_rank,
                                     task.index,  task.count,        ceil_div(num_rows, 16), 4096 / task.count + 1};
            if (task.count > 1 && threadIdx.x == 0) reduction.expect_partials();
            const float value_scale = scales.value(task.query_tile.kv_head);
            scale_log2 = scale_of_scores * scales.key(task.query_tile.kv_head);
            Rows rows;
            wait_for(shared.queries_full(), round % 2);
            attend(rows, task);
            if (task.count == 1) {
                store_rows(rows, out, task.query_tile, first_row, batch.num_kv_heads, value_scale);
                continue;
            }
            wait_for_cluster();  // all CTAs have read queries and keys
            reduction.send_partial(rows, warp, scale_log2);
            wait_for_sent(reduction.barrier, 0);
            reduction.reduce(out, task.query_tile, warp, batch.num_kv_heads, value_scale);
            return;
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
paged_prefill_short_sm90(T* __restrict__ out, const __grid_constant__ TensorMap query_map,
                                   const __grid_constant__ TensorMap cache_map, const int* __restrict__ block_tables,
                                   const int* __restrict__ context_lens, const int* __restrict__ query_start,
                                   int num_sequences, int num_kv_heads, int num_blocks, int num_layers, int layer,
                                   int max_blocks, int cluster_size, float scale_log2, int window,
                                   const float* kv_scales) {
    extern __shared__ unsigned char memory[];
    const Shared shared{(shared_address(memory) + 1023) / 1024 * 1024};
    const int warp = threadIdx.x / WARP_SIZE;
    start_next_kernel();
    if (threadIdx.x == CONSUMER_THREADS) {
        prefetch_map(query_map);
        prefetch_map(cache_map);
        make_barrier(shared.queries_full(), 1);
        make_barrier(shared.queries_empty(), CONSUMER_WARPS);
        make_barrier(shared.all_sent(), 1);
#if QUIRE_KV_FP8
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
    const Batch batch = {context_lens, query_start, num_sequences, num_kv_heads, max_blocks, window};
    if (warp >= CONSUMER_WARPS) {
        give_up_registers<56>();
#if QUIRE_KV_FP8
        if (warp > CONSUMER_WARPS) return widen_tiles(shared, batch, cluster_size, warp - CONSUMER_WARPS - 1);
        const FetchedRing pipeline = shared.fetched();
#else
        if (warp > CONSUMER_WARPS) return;
        const PipelineState pipeline;
#endif
        const Pool pool(num_blocks, num_layers, layer, num_kv_heads);
        Producer{shared, query_map, cache_map, pool, cluster_size, nullptr, 0, pipeline}.produce(batch, block_tables);
    } else {
        take_registers<224>();
        const int first_row = warp * 16 + threadIdx.x % WARP_SIZE / 4;
        Consumer{shared, warp / 4, first_row, cluster_size, scale_log2, window, {}}.consume(
            batch, out, KvScales(kv_scales, layer, num_kv_heads));
    }
}
