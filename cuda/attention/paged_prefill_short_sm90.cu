// Paged prefill attention on Hopper (sm_90a) for so few query rows that their pieces do not fill the device: a short
// chunk behind a long context. What paged_prefill_sm90.cu computes, for the least time to the last row
// instead of the most work a second.
//
// q, out [T, Hq, HEAD_DIM], block_tables, context_lens, query_start: as in paged_prefill.cu. `query_map` is q
// as a 3-D tensor map with boxes of 64 elements x GROUP heads x ROWS / GROUP tokens; `cache_map` is kv as a 2-D one of
// rows of HEAD_DIM, with boxes of 64 elements x min(KEYS, BLOCK_SIZE) rows; both with the 128-byte swizzle. Reference:
// NumpyOps.paged_prefill_attention. Grid (num_clusters * cluster_size), in clusters of up to MOST_PARTS, THREADS
// threads, SHARED_BYTES of dynamic shared memory. A build defines PADDED_ROWS (query rows of a piece, rounded up), KEYS
// (of a tile), STAGES (tiles on their way) and what attention.cuh needs.
//
// The CTAs of a cluster share the keys of a piece of work (prefill_tasks.cuh) and put its rows together in each other's
// shared memory (prefill_cluster.cuh), where queries and keys lay before. In a CTA, one warp has queries and tiles
// brought, and two warpgroups of 64 rows use them: the scores of a tile and the values of the one before are multiplied
// together, so that a tile's scores become weights while the values are under way.
//
// Keys run from the first tile to the last. What lies outside the part's keys in its first and last block is masked,
// and its values are overwritten with zeros, as nobody may have written them.
// Preconditions: those of paged_prefill.cu. Roofline: 16 bits a visible key's and value's element over memory
// bandwidth, which is 2 us of the 12 that 64 tokens behind 2,048 take on an H200.
#include "attention/attention.cuh"
#include "common/mma.cuh"
#include "attention/prefill_rows.cuh"
#include "attention/prefill_tasks.cuh"
#include "attention/prefill_tiles.cuh"
#include "attention/prefill_work.cuh"
#include "common/types.cuh"
#include "common/wgmma.cuh"

constexpr int CONSUMERS = 2;  // warpgroups
constexpr int CONSUMER_THREADS = CONSUMERS * WARPGROUP_SIZE;
constexpr int CONSUMER_WARPS = CONSUMER_THREADS / WARP_SIZE;
constexpr int THREADS = CONSUMER_THREADS + WARPGROUP_SIZE;
static_assert(PADDED_ROWS == CONSUMERS * 64, "every row has a warpgroup");
#include "attention/prefill_cluster.cuh"  // needs the number of warps

constexpr int BARRIER_BYTES = 8 * (3 + 4 * STAGES);
static_assert(QUIRE_DTYPE != 0 && (HEAD_DIM == 64 || HEAD_DIM == 128), "fp16 or bf16, rows of 128 or 256 bytes");
static_assert(MEETING_BYTES <= QUERY_BYTES + STAGES * TILE_BYTES, "parts meet where queries and keys lay");
static_assert(SHARED_BYTES == 1024 + QUERY_BYTES + 2 * STAGES * TILE_BYTES + BARRIER_BYTES,
              "the launcher's memory is not this");

// Shared memory: query rows and STAGES tiles of keys, where parts meet afterwards; as many of values; barriers.
struct Shared {
    u32 base;

    __device__ __forceinline__ u32 queries() const { return base; }
    __device__ __forceinline__ u32 keys(int stage) const { return base + QUERY_BYTES + stage * TILE_BYTES; }
    __device__ __forceinline__ u32 values(int stage) const { return keys(STAGES + stage); }
    __device__ __forceinline__ u32 barrier(int i) const { return values(STAGES) + 8 * i; }
    __device__ __forceinline__ u32 queries_full() const { return barrier(0); }
    __device__ __forceinline__ u32 queries_empty() const { return barrier(1); }
    __device__ __forceinline__ u32 all_sent() const { return barrier(2); }
    __device__ __forceinline__ u32 keys_full(int stage) const { return barrier(3 + stage); }
    __device__ __forceinline__ u32 keys_empty(int stage) const { return barrier(3 + STAGES + stage); }
    __device__ __forceinline__ u32 values_full(int stage) const { return barrier(3 + 2 * STAGES + stage); }
    __device__ __forceinline__ u32 values_empty(int stage) const { return barrier(3 + 3 * STAGES + stage); }
};

// How many tiles a side has gone through since the launch: which stage is next, and the parity of its phase.
struct Turn {
    u32 count = 0;

    __device__ __forceinline__ int stage() const { return count % STAGES; }
    __device__ __forceinline__ u32 parity() const { return count / STAGES % 2; }
};

// The warp that brings tiles. Its lanes hold the ids of the next WARP_SIZE boxes' blocks.
struct Producer {
    const Shared& shared;
    const TensorMap& query_map;
    const TensorMap& cache_map;
    const Pool pool;
    int cluster_size;
    const int* table;
    int ids;
    Turn turn;

    // Where in the cache map the box of this lane's number begins, of keys or of values.
    __device__ __forceinline__ int row_of(const Task& task, int tile, bool is_value) {
        const int lane = threadIdx.x % WARP_SIZE, in_ids = tile * NUM_IDS % WARP_SIZE;
        if (in_ids == 0 && !is_value) {
            const int key = task.begin + tile * KEYS + lane * BLOCK_KEYS;
            ids = key < task.work.end_key ? table[key / BLOCK_SIZE] : -1;
        }
        const int id = __shfl_sync(FULL_WARP, ids, in_ids + lane % NUM_IDS);
        const int row = pool.row(id, task.work.kv_head, task.begin + tile * KEYS + lane * BLOCK_KEYS);
        return is_value && row < pool.num_blocks * pool.block_rows ? row + pool.value_rows : row;
    }

    __device__ __forceinline__ void fetch_keys(const Task& task, int tile) {
        const int row = row_of(task, tile, false), stage = turn.stage();
        wait_for(shared.keys_empty(stage), turn.parity() ^ 1);
        fetch_tile(shared.keys(stage), cache_map, row, shared.keys_full(stage));
    }

    __device__ __forceinline__ void fetch_values(const Task& task, int tile) {
        const int row = row_of(task, tile, true), stage = turn.stage();
        wait_for(shared.values_empty(stage), turn.parity() ^ 1);
        fetch_tile(shared.values(stage), cache_map, row, shared.values_full(stage));
    }

    __device__ __forceinline__ void fetch_queries(const Work& work, int round) const {
        wait_for(shared.queries_empty(), (round + 1) % 2);
        if (threadIdx.x % WARP_SIZE != 0) return;
        arrive_expecting(shared.queries_full(), COLUMNS * ROWS * 128);
        for (int column = 0; column < COLUMNS; ++column)
            copy_box(shared.queries() + column * QUERY_COLUMN_BYTES, query_map, column * 64, work.kv_head * GROUP,
                     work.start + work.first_row / GROUP, shared.queries_full());
    }

    __device__ __forceinline__ void produce(const Batch& batch, const int* block_tables) {
        for (int round = 0;; ++round) {
            const Task task = find_task(batch, cluster_size, round);
            const bool is_end = task.sequence == batch.num_sequences;
            table = block_tables + static_cast<i64>(is_end ? 0 : task.sequence) * batch.max_blocks;
            const int num_tiles = is_end ? 0 : task.num_tiles();
            if (round == 0) wait_for_previous_kernel();
            if (is_end) return;
            fetch_queries(task.work, round);
            for (int tile = 0; tile < num_tiles; ++tile, ++turn.count) {
                fetch_keys(task, tile);
                fetch_values(task, tile);
            }
        }
    }
};

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
    int first_row;  // of the piece: this thread's row of half 0
    int cluster_size;
    float scale_log2;
    int window;
    Turn turn;

    __device__ __forceinline__ u32 queries() const { return shared.queries() + index * 64 * 128; }

    __device__ __forceinline__ void start_tile(float (&score)[KEYS / 2]) const {
        wait_for(shared.keys_full(turn.stage()), turn.parity());
        start_scores(score, queries(), shared.keys(turn.stage()));
    }

    __device__ __forceinline__ void start_sums(Rows& rows, const u32 (&weights)[KEYS / 16][4], const Task& task,
                                               int tile, const Turn& of) const {
        wait_for(shared.values_full(of.stage()), of.parity());
        clear_unseen_values(task, tile, shared.values(of.stage()));
        begin_products();
        start_values(rows, weights, shared.values(of.stage()));
    }

    __device__ __forceinline__ void leave_keys(const Task& task, int tile) const {
        release(shared.keys_empty(turn.stage()));
        if (tile + 1 == task.num_tiles()) leave_queries(task);
    }

    // Zeros for the values of keys that no row of the part sees, by a warpgroup for itself: the others write the same.
    __device__ __forceinline__ void clear_unseen_values(const Task& task, int tile, u32 values) const {
        const int begin = task.begin + tile * KEYS;
        const bool is_cut = (task.work.first_key > begin && task.work.first_key % BLOCK_KEYS != 0) ||
                            (task.work.end_key < begin + KEYS && task.work.end_key % BLOCK_KEYS != 0);
        if (!is_cut) return;
        for (int i = threadIdx.x % WARPGROUP_SIZE; i < KEYS * COLUMNS * 8; i += WARPGROUP_SIZE) {
            const int key = begin + i / 8 % KEYS;
            if (key >= task.work.first_key && key < task.work.end_key) continue;
            asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};"
                         :
                         : "r"(values + i * 16), "r"(0)
                         : "memory");
        }
        publish_stores();
        meet(1 + index, WARPGROUP_SIZE);
    }

    // Turns the scores of a tile into weights; only a tile at an edge of what the rows see needs the mask.
    __device__ __forceinline__ void weigh(Rows& rows, float (&correction)[2], float (&score)[KEYS / 2],
                                          const Task& task, int tile) const {
        const Work& work = task.work;
        const int first = work.first_row + index * 64, begin = task.begin + tile * KEYS;
        const bool all_seen = begin + KEYS - 1 <= work.position(first) && begin + KEYS <= work.end_key &&
                              begin > work.position(first + 63) - window;
        if (!all_seen) {
            const int row = work.first_row + first_row, last = work.end_key - 1;
            const int at[2] = {work.position(row), work.position(row + 8)};
            const int behind[2] = {min(at[0], last) - begin, min(at[1], last) - begin};
            const int seen[2] = {max(0, window - max(0, at[0] - last)), max(0, window - max(0, at[1] - last))};
            mask_tile(score, behind, seen);
        }
        weigh_scores(rows, correction, score, scale_log2);
    }

    // Queries and keys may be written over, by the next piece or, where that is the last, by what others send.
    __device__ __forceinline__ void leave_queries(const Task& task) const {
        release(shared.queries_empty());
        if (task.count > 1) arrive_at_cluster();
    }

    // A warpgroup without rows.
    __device__ __forceinline__ void let_pass(const Task& task) {
        for (int tile = 0; tile < task.num_tiles(); ++tile, ++turn.count) {
            wait_for(shared.keys_full(turn.stage()), turn.parity());
            release(shared.keys_empty(turn.stage()));
            wait_for(shared.values_full(turn.stage()), turn.parity());
            release(shared.values_empty(turn.stage()));
        }
        leave_queries(task);
    }

    __device__ __forceinline__ void attend(Rows& rows, const Task& task) {
        const int num_tiles = task.num_tiles();
        if (num_tiles == 0 || !task.work.holds(index * 64)) return let_pass(task);
        float score[KEYS / 2], correction[2];
        u32 weights[KEYS / 16][4];
        start_tile(score);
        wait_for_products<0>(score);
        leave_keys(task, 0);
        weigh(rows, correction, score, task, 0);
        pack_weights(weights, score);
        for (int tile = 0; tile + 1 < num_tiles; ++tile) {
            const Turn now = turn;
            ++turn.count;
            start_tile(score);
            start_sums(rows, weights, task, tile, now);
            wait_for_products<1>(score);
            leave_keys(task, tile + 1);
            weigh(rows, correction, score, task, tile + 1);
            wait_for_products<0>(rows.sum);
            release(shared.values_empty(now.stage()));
            rescale_sums(rows, correction);
            pack_weights(weights, score);
        }
        start_sums(rows, weights, task, num_tiles - 1, turn);
        wait_for_products<0>(rows.sum);
        release(shared.values_empty(turn.stage()));
        ++turn.count;
    }

    __device__ __forceinline__ void consume(const Batch& batch, T* out) {
        const int warp = threadIdx.x / WARP_SIZE;
        for (int round = 0;; ++round) {
            const Task task = find_task(batch, cluster_size, round);
            if (task.sequence == batch.num_sequences) return;
            const int first_rank = blockIdx.x - quotient(blockIdx.x, cluster_size) * cluster_size - task.index;
            const int num_rows = min(ROWS, task.work.num_rows - task.work.first_row);
            const Meeting meeting = {shared.base, shared.all_sent(), first_rank,
                                     task.index,  task.count,        ceil_div(num_rows, 16), 4096 / task.count + 1};
            if (task.count > 1 && threadIdx.x == 0) meeting.expect();
            Rows rows;
            wait_for(shared.queries_full(), round % 2);
            attend(rows, task);
            if (task.count == 1) {
                store_rows(rows, out, task.work, first_row, batch.num_kv_heads);
                continue;
            }
            wait_for_cluster();  // nobody reads queries or keys any more
            meeting.leave(rows, warp, scale_log2);
            wait_for_sent(meeting.barrier, 0);
            meeting.combine(out, task.work, warp, batch.num_kv_heads);
            return;
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
paged_prefill_short_sm90(T* __restrict__ out, const __grid_constant__ TensorMap query_map,
                                   const __grid_constant__ TensorMap cache_map, const int* __restrict__ block_tables,
                                   const int* __restrict__ context_lens, const int* __restrict__ query_start,
                                   int num_sequences, int num_kv_heads, int num_blocks, int num_layers, int layer,
                                   int max_blocks, int cluster_size, float scale_log2, int window) {
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
        for (int stage = 0; stage < STAGES; ++stage) {
            make_barrier(shared.keys_full(stage), 1);
            make_barrier(shared.values_full(stage), 1);
            make_barrier(shared.keys_empty(stage), CONSUMER_WARPS);
            make_barrier(shared.values_empty(stage), CONSUMER_WARPS);
        }
        publish_barriers();
    }
    __syncthreads();
    const Batch batch = {context_lens, query_start, num_sequences, num_kv_heads, max_blocks, window};
    if (warp >= CONSUMER_WARPS) {
        give_up_registers<56>();
        if (warp > CONSUMER_WARPS) return;
        const Pool pool(num_blocks, num_layers, layer, num_kv_heads);
        Producer{shared, query_map, cache_map, pool, cluster_size, nullptr, 0, {}}.produce(batch, block_tables);
    } else {
        take_registers<224>();
        const int first_row = warp * 16 + threadIdx.x % WARP_SIZE / 4;
        Consumer{shared, warp / 4, first_row, cluster_size, scale_log2, window, {}}.consume(batch, out);
    }
}
