// Query tiles, key tiles and online softmax of the Hopper prefill kernels.
//
// A query tile is ROWS query rows of a kv head; row r is query head r % GROUP of the chunk's token r / GROUP. Tile
// indices run through kv heads, a chunk's tiles (longest first), sequences. With at most 32 sequences and several CTAs
// per tile, the CTAs split its keys; indices then run through the first splits of all tiles, the second, ...
//
// Build macros: KEYS (of a key tile), PADDED_ROWS. The cache map is kv as rows of HEAD_DIM, in boxes of 64 elements x
// BLOCK_KEYS rows with the 128-byte swizzle; e4m3: boxes of whole rows, unswizzled.
#pragma once

#include "attention/paged_kv.cuh"
#include "common/mma.cuh"
#include "common/types.cuh"
#include "common/wgmma.cuh"

constexpr int ROWS = PADDED_ROWS / GROUP * GROUP;
constexpr int MIN_SPLIT_TILES = 2;

struct QueryTile {
    int kv_head;
    int start, num_rows;  // first token in q and out; tokens * GROUP
    int first_position;  // of the chunk in its sequence
    int first_row;  // of the tile; >= num_rows: no tile is left
    int first_key, end_key;

    __device__ __forceinline__ int position(int row) const { return first_position + row / GROUP; }
    __device__ __forceinline__ bool holds(int row) const { return row < ROWS && first_row + row < num_rows; }
    __device__ __forceinline__ i64 head(int row, int num_kv_heads) const {
        const int of_chunk = first_row + row;
        const i64 token = start + of_chunk / GROUP;
        return (token * num_kv_heads + kv_head) * GROUP + of_chunk % GROUP;
    }
    __device__ __forceinline__ int first_key_tile() const { return first_key / KEYS; }
    __device__ __forceinline__ int num_key_tiles() const { return max(0, ceil_div(end_key, KEYS) - first_key_tile()); }
};

// One split of a query tile's keys; empty if it does not exist.
struct KvSplit {
    int index, count;
    int tile_index, num_query_tiles;

    __device__ __forceinline__ bool exists() const { return index < count; }
    __device__ __forceinline__ int query_tile() const { return tile_index % num_query_tiles; }
};

struct Chunk {
    int start, num_tokens, context_len;
};

struct Batch {
    const int* context_lens;
    const int* query_start;
    int num_sequences, num_kv_heads, max_blocks, window;

    // Called by a warp. Returns the sequence; past the last tile returns num_sequences and sets `num_indices`.
    __device__ __forceinline__ int find(QueryTile& tile, KvSplit& split, int tile_index, int& num_indices) const {
        const int lane = threadIdx.x % WARP_SIZE;
        int wanted = tile_index / num_kv_heads, before = 0;
        split = {0, 1, tile_index, 1};
        for (int base = 0; base < num_sequences; base += WARP_SIZE) {
            const int sequence = base + lane;
            int start = 0, num_tokens = 0;
            if (sequence < num_sequences) {
                start = query_start[sequence];
                num_tokens = query_start[sequence + 1] - start;
            }
            const int count = ceil_div(max(0, num_tokens) * GROUP, ROWS);
            int end = count;
#pragma unroll
            for (int offset = 1; offset < WARP_SIZE; offset *= 2) {
                const int left = __shfl_up_sync(FULL_WARP, end, offset);
                if (lane >= offset) end += left;
            }
            const int total = __shfl_sync(FULL_WARP, end, WARP_SIZE - 1);
            if (num_sequences <= WARP_SIZE && total > 0) {
                split.num_query_tiles = total * num_kv_heads;
                split.count = max(1, static_cast<int>(gridDim.x) / split.num_query_tiles);
                split.index = tile_index / split.num_query_tiles;
                if (split.exists()) wanted = split.query_tile() / num_kv_heads;
            }
            const u32 candidates = __ballot_sync(FULL_WARP, before + end > wanted);
            if (candidates != 0) {
                const int owner = __ffs(candidates) - 1;
                const int of_chunk = before + __shfl_sync(FULL_WARP, end, owner) - 1 - wanted;
                describe(tile, base + owner, tile_index % num_kv_heads, of_chunk * ROWS);
                cut(tile, split);
                return base + owner;
            }
            before += total;
        }
        num_indices = before * num_kv_heads * split.count;
        tile.first_row = tile.num_rows = 0;
        return num_sequences;
    }

    __device__ __forceinline__ void describe(QueryTile& tile, int sequence, int kv_head, int first_row) const {
        const int start = query_start[sequence];
        describe(tile, {start, query_start[sequence + 1] - start, context_lens[sequence]}, kv_head, first_row);
    }

    __device__ __forceinline__ void describe(QueryTile& tile, const Chunk& chunk, int kv_head, int first_row) const {
        tile.kv_head = kv_head;
        tile.start = chunk.start;
        tile.num_rows = chunk.num_tokens * GROUP;
        tile.first_position = chunk.context_len - chunk.num_tokens;
        tile.first_row = first_row;
        tile.first_key = max(0, tile.position(first_row) - window + 1);
        const int end = tile.position(min(first_row + ROWS, tile.num_rows) - 1) + 1;
        tile.end_key = min(end, max(0, min(chunk.context_len, max_blocks * BLOCK_SIZE)));
    }

    __device__ __forceinline__ void cut(QueryTile& tile, KvSplit& split) const {
        const int num_tiles = tile.num_key_tiles(), first = tile.first_key_tile();
        split.count = min(split.count, max(1, num_tiles / MIN_SPLIT_TILES));
        tile.first_key = max(tile.first_key, (first + split.index * num_tiles / split.count) * KEYS);
        tile.end_key = min(tile.end_key, (first + (split.index + 1) * num_tiles / split.count) * KEYS);
    }
};

// Element i is in row 8 h + lane / 4 of the warp's 16, h = i / 2 % 2, column i / 4 * 8 + lane % 4 * 2 + i % 2.
struct Rows {
    float sum[HEAD_DIM / 2];
    float maximum[2];  // of raw scores
    float total[2];  // over this thread's keys

    __device__ __forceinline__ Rows() {
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; ++i) sum[i] = 0.0f;
        maximum[0] = maximum[1] = minus_infinity();
        total[0] = total[1] = 0.0f;
    }
};

// `last`: a row's last visible key, relative to the tile's first.
__device__ __forceinline__ void mask_tile(float (&score)[KEYS / 2], const int (&last)[2],
                                          const int (&num_visible)[2]) {
#pragma unroll
    for (int i = 0; i < KEYS / 2; ++i) {
        const int distance = last[i / 2 % 2] - (i / 4 * 8 + i % 2) - threadIdx.x % 4 * 2;
        if (static_cast<u32>(distance) >= static_cast<u32>(num_visible[i / 2 % 2])) score[i] = minus_infinity();
    }
}

// Online softmax: scores become weights 2^((score - maximum) * scale_log2); the caller multiplies sums by `correction`.
__device__ __forceinline__ void weigh_scores(Rows& rows, float (&correction)[2], float (&score)[KEYS / 2],
                                             float scale_log2) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float top[2] = {rows.maximum[h], rows.maximum[h]}, split[2] = {};
#pragma unroll
        for (int i = 2 * h; i < KEYS / 2; i += 4) {
            top[0] = fmaxf(top[0], score[i]);
            top[1] = fmaxf(top[1], score[i + 1]);
        }
        float best = fmaxf(top[0], top[1]);
        best = fmaxf(best, __shfl_xor_sync(FULL_WARP, best, 1));
        best = fmaxf(best, __shfl_xor_sync(FULL_WARP, best, 2));
        const float base = finite_base(best) * scale_log2;
        correction[h] = exp2_approx(rows.maximum[h] * scale_log2 - base);
        rows.maximum[h] = best;
#pragma unroll
        for (int i = 2 * h; i < KEYS / 2; i += 4) {
            score[i] = exp2_approx(fmaf(score[i], scale_log2, -base));
            score[i + 1] = exp2_approx(fmaf(score[i + 1], scale_log2, -base));
            split[0] += score[i];
            split[1] += score[i + 1];
        }
        rows.total[h] = fmaf(rows.total[h], correction[h], split[0] + split[1]);
    }
}

__device__ __forceinline__ void rescale_sums(Rows& rows, const float (&correction)[2]) {
    if (!__any_sync(FULL_WARP, correction[0] != 1.0f || correction[1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) rows.sum[i] *= correction[i / 2 % 2];
}

// Both steps; no product with values may be in flight.
__device__ __forceinline__ void weigh_tile(Rows& rows, float (&score)[KEYS / 2], float scale_log2) {
    float correction[2];
    weigh_scores(rows, correction, score, scale_log2);
    rescale_sums(rows, correction);
}

__device__ __forceinline__ void pack_weights(u32 (&weights)[KEYS / 16][4], const float (&score)[KEYS / 2]) {
#pragma unroll
    for (int i = 0; i < KEYS / 4; ++i) weights[i / 4][i % 4] = pack_operand(score[2 * i], score[2 * i + 1]);
}

__device__ __forceinline__ uint4 gather_pairs(const u32 (&pair)[4]) {
    const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
    const u32 low = __shfl_xor_sync(FULL_WARP, odd ? pair[0] : pair[1], 1);
    const u32 high = __shfl_xor_sync(FULL_WARP, odd ? pair[2] : pair[3], 1);
    const u32 near[4] = {odd ? low : pair[0], odd ? pair[1] : low, odd ? high : pair[2], odd ? pair[3] : high};
    const u32 first = __shfl_xor_sync(FULL_WARP, upper ? near[0] : near[2], 2);
    const u32 second = __shfl_xor_sync(FULL_WARP, upper ? near[1] : near[3], 2);
    return upper ? make_uint4(first, second, near[2], near[3]) : make_uint4(near[0], near[1], first, second);
}

__device__ __forceinline__ float sum_of_four(float x) {
    x += __shfl_xor_sync(FULL_WARP, x, 1);
    return x + __shfl_xor_sync(FULL_WARP, x, 2);
}

__device__ __forceinline__ void store_rows(const Rows& rows, T* out, const QueryTile& tile, int first_row,
                                           int num_kv_heads, float value_scale) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const float scale = reciprocal_or_zero(sum_of_four(rows.total[h])) * value_scale;
        const int row = first_row + 8 * h;
        T* to = out + tile.head(row, num_kv_heads) * HEAD_DIM + threadIdx.x % 4 * 8;
        const bool is_mine = tile.holds(row);
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 32; ++n) {
            u32 pair[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int at = 16 * n + 4 * i + 2 * h;
                pair[i] = pack_pair(rows.sum[at] * scale, rows.sum[at + 1] * scale);
            }
            const uint4 columns = gather_pairs(pair);
            if (is_mine) *reinterpret_cast<uint4*>(to + 32 * n) = columns;
        }
    }
}

constexpr int COLUMNS = HEAD_DIM / 64;
constexpr int QUERY_COLUMN_BYTES = PADDED_ROWS * 128;
constexpr int KEY_COLUMN_BYTES = KEYS * 128;
constexpr int QUERY_BYTES = COLUMNS * QUERY_COLUMN_BYTES;
constexpr int TILE_BYTES = COLUMNS * KEY_COLUMN_BYTES;
constexpr int BLOCK_KEYS = at_most(KEYS, BLOCK_SIZE);
constexpr int NUM_IDS = KEYS / BLOCK_KEYS;
static_assert(NUM_IDS <= WARP_SIZE, "a lane holds one block id of a tile");

struct Pool {
    int num_blocks, block_rows, layer_row, value_rows;

    __device__ __forceinline__ Pool(int num_blocks, int num_layers, int layer, int num_kv_heads)
        : num_blocks(num_blocks) {
        value_rows = num_kv_heads * BLOCK_SIZE;
        block_rows = 2 * num_layers * value_rows;
        layer_row = 2 * layer * value_rows;
    }

    // Row of key `first` in the map; an unknown block is past the end, which reads as zeros.
    __device__ __forceinline__ int row(int block_id, int kv_head, int first) const {
        const bool exists = static_cast<u32>(block_id) < static_cast<u32>(num_blocks);
        return exists ? block_id * block_rows + layer_row + kv_head * BLOCK_SIZE + first % BLOCK_SIZE
                        : num_blocks * block_rows;
    }
};

// Called by a whole warp; lane i's row is the start of box i.
__device__ __forceinline__ void fetch_tile(u32 tile, const TensorMap& map, int row, u32 barrier) {
    if (threadIdx.x % WARP_SIZE == 0) arrive_expecting(barrier, TILE_BYTES);
    __syncwarp();
#pragma unroll
    for (int first = 0; first < NUM_IDS; first += 4) {
        int rows[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) rows[i] = __shfl_sync(FULL_WARP, row, first + i);
        if (!is_elected()) continue;
#pragma unroll
        for (int i = 0; i < at_most(4, NUM_IDS); ++i) {
            const u32 to = tile + (first + i) * BLOCK_KEYS * 128;
#pragma unroll
            for (int column = 0; column < COLUMNS; ++column)
                copy_box(to + column * KEY_COLUMN_BYTES, map, column * 64, rows[i], barrier);
        }
    }
    __syncwarp();
}

__device__ __forceinline__ void start_values(Rows& rows, const u32 (&weights)[KEYS / 16][4], u32 values) {
    const u64 b = operand(values, KEY_COLUMN_BYTES);
#pragma unroll
    for (int k = 0; k < KEYS / 16; ++k) multiply_add_transposed(rows.sum, weights[k], b + k * 16 * 128 / 16);
    commit_products();
}

// Called by a whole warp, after its reads.
__device__ __forceinline__ void release(u32 barrier) {
    __syncwarp();
    if (threadIdx.x % WARP_SIZE == 0) arrive(barrier);
}

#if SCALES_QUERIES
// Scales a warp's 16 rows. The warps of a wgmma must synchronise afterwards.
__device__ __forceinline__ float scale_own_queries(u32 queries, const QueryTile& tile, int first_row) {
    const u32 own = queries + first_row * 128;
    const int num_held = min(ROWS, tile.num_rows - tile.first_row) - first_row;
    const float down = scale_queries<16>(num_held, [&](int row, int chunk) {
        return own + chunk / 8 * QUERY_COLUMN_BYTES + row * 128 + (chunk % 8 ^ row % 8) * 16;
    });
    publish_stores();
    return down;
}
#endif

// Arrivals of TMA, or of the widening warps.
#if QUIRE_KV_FP8
#define TILE_ARRIVALS NUM_WIDENERS
#else
#define TILE_ARRIVALS 1
#endif

#if QUIRE_KV_FP8

constexpr int NUM_WIDENERS = 3;
constexpr int FETCHED_BYTES = KEYS * HEAD_DIM;

// Ring of fetched e4m3 tiles, keys and values alternating.
struct FetchedRing {
    u32 base, barriers;
    int stage = 0;
    u32 parity = 0;

    __device__ __forceinline__ u32 tile() const { return base + stage * FETCHED_BYTES; }
    __device__ __forceinline__ u32 full() const { return barriers + 8 * stage; }
    __device__ __forceinline__ u32 empty() const { return barriers + 8 * (FETCHED_STAGES + stage); }
    __device__ __forceinline__ void advance() {
        if (++stage == FETCHED_STAGES) stage = 0, parity ^= 1;
    }
    __device__ __forceinline__ void make_barriers() const {
        for (int i = 0; i < FETCHED_STAGES; ++i) {
            make_barrier(barriers + 8 * i, 1);
            make_barrier(barriers + 8 * (FETCHED_STAGES + i), NUM_WIDENERS);
        }
    }
};

// Widens the next fetched tile to float16 in the operand swizzle; called by the widening warps. A unit is four steps of
// eight numbers per lane, 8 rows apart: one address plus constants saves registers. Each store is followed by a load
// for the next unit.
__device__ __forceinline__ void widen_tile(FetchedRing& ring, u32 to, u32 to_empty, u32 parity, u32 to_full, u32 warp) {
    constexpr int CHUNKS = HEAD_DIM / 8, ROWS_A_STEP = WARP_SIZE / CHUNKS, SETS = 8 / ROWS_A_STEP, STEPS = 4;
    constexpr int UNITS = KEYS / 8 / STEPS * SETS;
    const int lane = threadIdx.x % WARP_SIZE, row = lane / CHUNKS, chunk = lane % CHUNKS;
    uint2 held[STEPS];
    const auto from = [&](u32 unit) {
        return ring.tile() + lane * 8 + unit % SETS * (WARP_SIZE * 8) + unit / SETS * (STEPS * 8 * HEAD_DIM);
    };
    wait_for(ring.full(), ring.parity);
#pragma unroll
    for (int i = 0; i < STEPS; ++i) held[i] = load_eight(from(warp) + i * 8 * HEAD_DIM);
    wait_for(to_empty, parity);
    const u32 first = to + chunk / 8 * KEY_COLUMN_BYTES + row * 128 + (chunk % 8 ^ row) * 16;
#pragma unroll 1
    for (u32 unit = warp; unit < UNITS; unit += NUM_WIDENERS) {
        const u32 set_row = unit % SETS * ROWS_A_STEP;
        const u32 at = (first ^ set_row * 16) + set_row * 128 + unit / SETS * (STEPS * 1024);
        const u32 next = from(min(unit + NUM_WIDENERS, UNITS - 1u));
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            store_widened(at + i * 1024, held[i]);
            held[i] = load_eight(next + i * 8 * HEAD_DIM);
        }
    }
    publish_stores();
    release(ring.empty());
    if (threadIdx.x % WARP_SIZE == 0) arrive(to_full);
    ring.advance();
}

// `fetch_tile` for e4m3.
__device__ __forceinline__ void fetch_bytes(FetchedRing& ring, const TensorMap& map, int row) {
    wait_for(ring.empty(), ring.parity ^ 1);
    if (threadIdx.x % WARP_SIZE == 0) arrive_expecting(ring.full(), FETCHED_BYTES);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < NUM_IDS; ++i) {
        const int from = __shfl_sync(FULL_WARP, row, i);
        if (is_elected()) copy_box(ring.tile() + i * BLOCK_KEYS * HEAD_DIM, map, 0, from, ring.full());
    }
    __syncwarp();
    ring.advance();
}

#endif
