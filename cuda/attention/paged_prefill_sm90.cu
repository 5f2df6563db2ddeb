// Paged varlen prefill attention on Hopper (sm_90a): what paged_prefill.cu computes, for fp16 and bf16 and a
// HEAD_DIM of 64 or 128, by wgmma and the copy engine.
//
// q, out [T, Hq, HEAD_DIM], block_tables, context_lens, query_start: as there. `query_map` is q as a 3-D tensor map
// with boxes of 64 elements x GROUP heads x ROWS / GROUP tokens; `cache_map` is kv as a 2-D one of rows of HEAD_DIM,
// with boxes of 64 elements x min(KEYS, BLOCK_SIZE) rows; both with the 128-byte swizzle. Reference:
// NumpyOps.paged_prefill_attention. Grid (num_ctas), at most one CTA an SM, THREADS threads, SHARED_BYTES of dynamic
// shared memory. A launch draws nothing before the one ahead of it has ended: all draw their work from one counter,
// which the last drawer sets back.
//
// A piece of work is ROWS query rows of one kv head (row r is query head r % GROUP of the chunk's token r / GROUP).
// CTAs draw pieces, sequence by sequence, the longest of each first; where there are several CTAs for each piece, they
// share its keys (prefill_parts.cuh; `part_sums` float32[num_ctas, 192, HEAD_DIM] and `part_stats` float32[num_ctas,
// 192, 2] are theirs to meet in). In a CTA, one warp has queries and tiles of KEYS keys and values brought to shared
// memory, two stages ahead, a copy a block and 64 dimensions. Three warpgroups of 64 rows each take a tile at their own
// pace, so that the tensor cores work for one while others make weights. Three, because what bounds two is the road
// from L2: 128 rows reach 560 TFLOP/s, 690 if they need not wait for keys; 192 read a third less.
//
// Keys run from the last tile to the first. Rows that see no key get zeros; block ids outside the pool, and blocks
// that no row sees, arrive as zeros (boxes outside the map); what else lies outside in the first and last block is
// overwritten.
// Preconditions: those of paged_prefill.cu. Roofline: 4 * HEAD_DIM flop a visible (query, key) pair and
// head; on an H200 440 / 585 / 635 TFLOP/s in bf16 at 1k / 4k / 16k, warm.
#include "attention/paged_kv.cuh"
#include "attention/prefill_sm90.cuh"
#include "common/mma.cuh"
#include "common/types.cuh"
#include "common/wgmma.cuh"

constexpr int STAGES = 2;
constexpr int NUM_CONSUMERS = 3;  // warpgroups
constexpr int WARPGROUP_ROWS = 64;
static_assert(PADDED_ROWS == NUM_CONSUMERS * WARPGROUP_ROWS, "every row has a warpgroup");
constexpr int TAIL_BYTES = 256;  // barriers, the piece of work and the part of it
static_assert(SHARED_BYTES == QUERY_BYTES + 2 * STAGES * TILE_BYTES + TAIL_BYTES, "the launcher's memory is not this");

// Shared memory: query rows, STAGES tiles of keys, as many of values, barriers, the piece of work, the part of it.
struct Shared {
    unsigned char* base;

    __device__ __forceinline__ u32 queries() const { return shared_address(base); }
    __device__ __forceinline__ u32 keys(int stage) const { return queries() + QUERY_BYTES + stage * TILE_BYTES; }
    __device__ __forceinline__ u32 values(int stage) const { return keys(STAGES + stage); }
    __device__ __forceinline__ u32 barrier(int i) const { return keys(2 * STAGES) + 8 * i; }
    __device__ __forceinline__ u32 queries_full() const { return barrier(0); }
    __device__ __forceinline__ u32 queries_empty() const { return barrier(1); }
    __device__ __forceinline__ u32 keys_full(int stage) const { return barrier(2 + stage); }
    __device__ __forceinline__ u32 keys_empty(int stage) const { return barrier(2 + STAGES + stage); }
    __device__ __forceinline__ u32 values_full(int stage) const { return barrier(2 + 2 * STAGES + stage); }
    __device__ __forceinline__ u32 values_empty(int stage) const { return barrier(2 + 3 * STAGES + stage); }
    __device__ __forceinline__ Work* work() const {
        return reinterpret_cast<Work*>(base + QUERY_BYTES + 2 * STAGES * TILE_BYTES + TAIL_BYTES / 2);
    }
    __device__ __forceinline__ Part* part() const { return reinterpret_cast<Part*>(work() + 1); }
};

// How many tiles a side has gone through since the launch: which stage is next, and the parity of its phase.
struct Turn {
    u32 count = 0;

    __device__ __forceinline__ int stage() const { return count % STAGES; }
    __device__ __forceinline__ u32 parity() const { return count / STAGES % 2; }
};

constexpr int MAX_PARTS = 1024;  // of a launch, and so CTAs

// Parts that have left their rows, by piece. atomicInc wraps each to 0 with the last of them.
__device__ u32 parts_left[MAX_PARTS];

// Where the parts of a launch meet: sums float32[num_ctas, PADDED_ROWS, HEAD_DIM] and for each row its maximum, in
// units of log2, and its total.
struct Meeting {
    float* sums;
    float2* stats;

    // This thread's two rows of a part.
    __device__ __forceinline__ void leave(const Rows& rows, const Work& work, const Part& part, int first_row,
                                          float scale_log2) const {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float total = sum_of_four(rows.total[h]);
            const int row = first_row + 8 * h;
            if (!work.holds(row)) continue;
            const i64 at = static_cast<i64>(part.ticket) * PADDED_ROWS + row;
            float* to = sums + at * HEAD_DIM + threadIdx.x % 4 * 2;
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 8; ++i)
                *reinterpret_cast<float2*>(to + 8 * i) =
                    make_float2(rows.sum[4 * i + 2 * h], rows.sum[4 * i + 2 * h + 1]);
            if (threadIdx.x % 4 == 0) stats[at] = make_float2(rows.maximum[h] * scale_log2, total);
        }
    }

    // Every one of `num_threads` that left rows calls: when it returns, all parts of the piece are there to be read.
    __device__ __forceinline__ void wait_for_others(const Part& part, int barrier, int num_threads) const {
        __threadfence();
        meet(barrier, num_threads);
        if (threadIdx.x == WARPGROUP_SIZE) {  // the first of them
            u32* counter = &parts_left[part.piece()];
            const u32 last = part.count - 1;
            if (atomicInc(counter, last) != last)
                while (*static_cast<volatile u32*>(counter) != 0) __nanosleep(20);
            __threadfence();
        }
        meet(barrier, num_threads);
    }

    // This part's share of the piece's rows, a row a warp.
    __device__ __forceinline__ void combine(T* out, const Work& work, const Part& part, int warp, int num_warps,
                                            int num_kv_heads) const {
        const int lane = threadIdx.x % WARP_SIZE;
        for (int row = part.index + warp * part.count; work.holds(row); row += num_warps * part.count) {
            const auto at = [&](int index) {
                return static_cast<i64>(part.piece() + index * part.num_pieces) * PADDED_ROWS + row;
            };
            float maximum = minus_infinity(), total = 0.0f, sum[HEAD_DIM / WARP_SIZE] = {};
            for (int i = lane; i < part.count; i += WARP_SIZE) maximum = fmaxf(maximum, __ldcg(stats + at(i)).x);
            const float base = finite_base(warp_max(maximum));
#pragma unroll 4
            for (int i = 0; i < part.count; ++i) {
                const float2 stat = __ldcg(stats + at(i));
                const float weight = exp2_approx(stat.x - base);
                total += weight * stat.y;
#pragma unroll
                for (int j = 0; j < HEAD_DIM / WARP_SIZE; ++j)
                    sum[j] += weight * __ldcg(sums + at(i) * HEAD_DIM + lane + j * WARP_SIZE);
            }
            const float scale = reciprocal_or_zero(total);
            T* to = out + work.head(row, num_kv_heads) * HEAD_DIM + lane;
#pragma unroll
            for (int j = 0; j < HEAD_DIM / WARP_SIZE; ++j) to[j * WARP_SIZE] = from_float<T>(sum[j] * scale);
        }
    }
};

constexpr int THREADS = (NUM_CONSUMERS + 1) * WARPGROUP_SIZE;
constexpr int CONSUMER_WARPS = NUM_CONSUMERS * WARPGROUP_SIZE / WARP_SIZE;
constexpr int FIRST_MEETING = 1;  // named barriers: one for each consumer's own threads, then one for all of these
constexpr int ALL_MEET = FIRST_MEETING + NUM_CONSUMERS;
static_assert(QUIRE_DTYPE != 0 && (HEAD_DIM == 64 || HEAD_DIM == 128), "fp16 or bf16, rows of 128 or 256 bytes");

__device__ u32 num_drawn;  // tickets beyond the first of each CTA
constexpr u32 NONE_DRAWN = ~0u;

// The warp's next ticket; `drawn` becomes how many were drawn before.
__device__ __forceinline__ int draw(u32& drawn) {
    if (threadIdx.x % WARP_SIZE == 0) drawn = atomicAdd(&num_drawn, 1u);
    drawn = __shfl_sync(FULL_WARP, drawn, 0);
    return gridDim.x + drawn;
}

__device__ __forceinline__ void produce(const Shared& shared, const TensorMap& query_map, const TensorMap& cache_map,
                                        const Batch& batch, const Pool& pool, const int* block_tables) {
    const int lane = threadIdx.x % WARP_SIZE;
    int ticket = blockIdx.x;
    u32 drawn = NONE_DRAWN;
    Turn turn;
    for (u32 round = 0;;) {
        Work work;
        Part part;
        int num_tickets = 0;
        const int sequence = batch.find(work, part, ticket, num_tickets);  // from what no kernel of a graph writes
        wait_for_previous_kernel();
        const bool is_end = work.first_row >= work.num_rows;
        if (!is_end && !part.is_there()) {
            ticket = draw(drawn);
            continue;
        }
        wait_for(shared.queries_empty(), (round + 1) % 2);
        if (lane == 0) *shared.work() = work;
        if (is_end) {
            if (lane == 0) arrive(shared.queries_full());
            // A launch draws one ticket a part: each CTA begins with one undrawn, and ends with one too many.
            if (lane == 0 && drawn == static_cast<u32>(num_tickets) - 1) atomicExch(&num_drawn, 0u);
            return;
        }
        if (lane == 0) {
            *shared.part() = part;
            arrive_expecting(shared.queries_full(), COLUMNS * ROWS * 128);
            for (int column = 0; column < COLUMNS; ++column)
                copy_box(shared.queries() + column * QUERY_COLUMN_BYTES, query_map, column * 64, work.kv_head * GROUP,
                         work.start + work.first_row / GROUP, shared.queries_full());
        }
        const int* table = block_tables + static_cast<i64>(sequence) * batch.max_blocks;
        const int first_block = work.first_key / BLOCK_KEYS, end_block = ceil_div(work.end_key, BLOCK_KEYS);
        for (int tile = work.first_tile() + work.num_tiles() - 1; tile >= work.first_tile(); --tile, ++turn.count) {
            const int piece = tile * NUM_IDS + lane;  // of BLOCK_KEYS keys
            const bool is_seen = piece >= first_block && piece < end_block;
            const int id = is_seen ? table[piece * BLOCK_KEYS / BLOCK_SIZE] : -1;
            const int row = pool.row(id, work.kv_head, piece * BLOCK_KEYS);
            const int value_row = row < pool.num_blocks * pool.block_rows ? row + pool.value_rows : row;
            const int stage = turn.stage();
            wait_for(shared.keys_empty(stage), turn.parity() ^ 1);
            fetch_tile(shared.keys(stage), cache_map, row, shared.keys_full(stage));
            wait_for(shared.values_empty(stage), turn.parity() ^ 1);
            fetch_tile(shared.values(stage), cache_map, value_row, shared.values_full(stage));
        }
        ticket = draw(drawn);
        ++round;
    }
}

__device__ __forceinline__ void start_scores(float (&score)[KEYS / 2], u32 queries, u32 keys) {
    const u64 a = operand(queries, 0), b = operand(keys, 0);
    multiply<0>(score, a, b);
#pragma unroll
    for (int k = 1; k < HEAD_DIM / 16; ++k)
        multiply<1>(score, a + (k / 4 * QUERY_COLUMN_BYTES + k % 4 * 32) / 16,
                    b + (k / 4 * KEY_COLUMN_BYTES + k % 4 * 32) / 16);
    commit_products();
}

// Whether a block of the tile holds keys that no row of the piece sees: nobody may have written their values.
__device__ __forceinline__ bool is_cut(const Work& work, int tile) {
    const int begin = tile * KEYS;
    return (work.first_key > begin && work.first_key % BLOCK_KEYS != 0) ||
           (work.end_key < begin + KEYS && work.end_key % BLOCK_KEYS != 0);
}

// Zeros for the values of those keys, by a warpgroup for itself: the others write the same.
__device__ __forceinline__ void clear_unseen_values(u32 values, const Work& work, int tile, int consumer) {
    for (int i = threadIdx.x % WARPGROUP_SIZE; i < KEYS * COLUMNS * 8; i += WARPGROUP_SIZE) {
        const int key = tile * KEYS + i / 8 % KEYS;
        if (key >= work.first_key && key < work.end_key) continue;
        asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" : : "r"(values + i * 16), "r"(0) : "memory");
    }
    publish_stores();
    meet(FIRST_MEETING + consumer, WARPGROUP_SIZE);
}

struct Consumer {
    const Shared& shared;
    int index;
    int first_row;  // of the piece: this thread's row of half 0
    float scale_log2;
    int window;
    Turn turn;

    __device__ __forceinline__ u32 queries() const { return shared.queries() + index * WARPGROUP_ROWS * 128; }

    // Turns the scores of a tile into weights; only a tile at an edge of what the rows see needs the mask.
    __device__ __forceinline__ void weigh(Rows& rows, float (&score)[KEYS / 2], const Work& work, int tile) const {
        const int first = work.first_row + index * WARPGROUP_ROWS, begin = tile * KEYS;
        const bool all_seen = begin + KEYS - 1 <= work.position(first) &&
                              begin > work.position(first + WARPGROUP_ROWS - 1) - window;
        if (!all_seen) {
            const int row = work.first_row + first_row;
            const int behind[2] = {work.position(row) - begin, work.position(row + 8) - begin};
            const int seen[2] = {window, window};
            mask_tile(score, behind, seen);
        }
        weigh_tile(rows, score, scale_log2);
    }

    __device__ __forceinline__ void attend(Rows& rows, const Work& work) {
        const int first_tile = work.first_tile();
        int tile = first_tile + work.num_tiles() - 1;
        if (tile < first_tile) return release(shared.queries_empty());
        for (; tile >= first_tile; --tile, ++turn.count) {
            const int stage = turn.stage();
            float score[KEYS / 2];
            wait_for(shared.keys_full(stage), turn.parity());
            begin_products();
            start_scores(score, queries(), shared.keys(stage));
            wait_for_products<0>(score);
            release(shared.keys_empty(stage));
            if (tile == first_tile) release(shared.queries_empty());
            weigh(rows, score, work, tile);
            u32 weights[KEYS / 16][4];
            pack_weights(weights, score);
            wait_for(shared.values_full(stage), turn.parity());
            if (is_cut(work, tile)) clear_unseen_values(shared.values(stage), work, tile, index);
            begin_products();
            start_values(rows, weights, shared.values(stage));
            wait_for_products<0>(rows.sum);
            release(shared.values_empty(stage));
        }
    }
};

__device__ __forceinline__ void consume(const Shared& shared, T* out, const Meeting& meeting, int num_kv_heads,
                                        float scale_log2, int window) {
    const int index = threadIdx.x / WARPGROUP_SIZE - 1, lane = threadIdx.x % WARP_SIZE;
    const int warp = threadIdx.x / WARP_SIZE - WARPGROUP_SIZE / WARP_SIZE;
    Consumer consumer = {shared, index, warp * 16 + lane / 4, scale_log2, window, {}};
    for (u32 round = 0;; ++round) {
        wait_for(shared.queries_full(), round % 2);
        const Work work = *shared.work();
        if (work.first_row >= work.num_rows) return;
        Rows rows;
        consumer.attend(rows, work);
        // A CTA that has a part has no other piece: what it leaves for that costs the loop no registers.
        if (shared.part()->count > 1) {
            const Part part = *shared.part();
            meeting.leave(rows, work, part, consumer.first_row, scale_log2);
            meeting.wait_for_others(part, ALL_MEET, NUM_CONSUMERS * WARPGROUP_SIZE);
            meeting.combine(out, work, part, warp, CONSUMER_WARPS, num_kv_heads);
            return;
        }
        store_rows(rows, out, work, consumer.first_row, num_kv_heads);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
paged_prefill_sm90(T* __restrict__ out, const __grid_constant__ TensorMap query_map,
                             const __grid_constant__ TensorMap cache_map, const int* __restrict__ block_tables,
                             const int* __restrict__ context_lens, const int* __restrict__ query_start,
                             float* __restrict__ part_sums, float2* __restrict__ part_stats, int num_sequences,
                             int num_kv_heads, int num_blocks, int num_layers, int layer, int max_blocks,
                             float scale_log2, int window) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const Shared shared{memory};
    start_next_kernel();
    if (threadIdx.x == 0) {
        make_barrier(shared.queries_full(), 1);
        make_barrier(shared.queries_empty(), CONSUMER_WARPS);
        for (int stage = 0; stage < STAGES; ++stage) {
            make_barrier(shared.keys_full(stage), 1);
            make_barrier(shared.values_full(stage), 1);
            make_barrier(shared.keys_empty(stage), CONSUMER_WARPS);
            make_barrier(shared.values_empty(stage), CONSUMER_WARPS);
        }
        publish_barriers();
    }
    __syncthreads();
    if (threadIdx.x < WARPGROUP_SIZE) {
        give_up_registers<32>();
        if (threadIdx.x >= WARP_SIZE) return;
        const Batch batch = {context_lens, query_start, num_sequences, num_kv_heads, max_blocks, window};
        produce(shared, query_map, cache_map, batch, Pool(num_blocks, num_layers, layer, num_kv_heads), block_tables);
    } else {
        take_registers<160>();
        consume(shared, out, Meeting{part_sums, part_stats}, num_kv_heads, scale_log2, window);
    }
}
