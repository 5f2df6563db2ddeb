// How prefill attention of several chunks is cut into pieces of work, and how a ticket names a piece: for grids of
// fewer blocks than pieces, which draw tickets until there are no more.
//
// A piece is ROWS query rows of one kv head: row r is query head r % GROUP of the chunk's token r / GROUP. Tickets run
// through the kv heads of a piece, then through a chunk's pieces, the longest first, then through the sequences. Where
// a warp's lanes see all sequences and the grid has several blocks for each piece, these share its keys: tickets then
// run through the first part of every piece, then through the second parts.
#pragma once

#include "attention/paged_kv.cuh"
#include "common/mma.cuh"
#include "common/types.cuh"
#include "common/wgmma.cuh"

constexpr int ROWS = PADDED_ROWS / GROUP * GROUP;
constexpr int MIN_PART_TILES = 2;

struct Work {
    int kv_head;
    int start, num_rows;  // first token of the chunk in q and out; tokens * GROUP
    int first_position;   // of the chunk's first token in its sequence
    int first_row;        // of the piece; behind num_rows where there is no more work
    int first_key, end_key;

    __device__ __forceinline__ int position(int row) const { return first_position + row / GROUP; }
    __device__ __forceinline__ bool holds(int row) const { return row < ROWS && first_row + row < num_rows; }
    // The query head of a row of the piece, among those of all tokens.
    __device__ __forceinline__ i64 head(int row, int num_kv_heads) const {
        const int of_chunk = first_row + row;
        const i64 token = start + of_chunk / GROUP;
        return (token * num_kv_heads + kv_head) * GROUP + of_chunk % GROUP;
    }
    __device__ __forceinline__ int first_tile() const { return first_key / KEYS; }
    __device__ __forceinline__ int num_tiles() const { return max(0, ceil_div(end_key, KEYS) - first_tile()); }
};

// Which of the parts of its piece a ticket stands for; behind the last there is nothing to do.
struct Part {
    int index, count;
    int ticket, num_pieces;

    __device__ __forceinline__ bool is_there() const { return index < count; }
    __device__ __forceinline__ int piece() const { return ticket % num_pieces; }
};

// Of a sequence: its first token in q, and how many of the context's last tokens it has.
struct Chunk {
    int start, num_tokens, context_len;
};

// What a launch works on, and the piece of it that a ticket stands for.
struct Batch {
    const int* context_lens;
    const int* query_start;
    int num_sequences, num_kv_heads, max_blocks, window;

    // Every lane of a warp calls, and gets the same. `num_tickets` is known once a ticket lies behind all of them.
    __device__ __forceinline__ int find(Work& work, Part& part, int ticket, int& num_tickets) const {
        const int lane = threadIdx.x % WARP_SIZE;
        int wanted = ticket / num_kv_heads, before = 0;
        part = {0, 1, ticket, 1};
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
                part.num_pieces = total * num_kv_heads;
                part.count = max(1, static_cast<int>(gridDim.x) / part.num_pieces);
                part.index = ticket / part.num_pieces;
                if (part.is_there()) wanted = part.piece() / num_kv_heads;
            }
            const u32 behind = __ballot_sync(FULL_WARP, before + end > wanted);
            if (behind != 0) {
                const int owner = __ffs(behind) - 1;
                const int piece = before + __shfl_sync(FULL_WARP, end, owner) - 1 - wanted;  // from the chunk's start
                describe(work, base + owner, ticket % num_kv_heads, piece * ROWS);
                cut(work, part);
                return base + owner;
            }
            before += total;
        }
        num_tickets = before * num_kv_heads * part.count;
        work.first_row = work.num_rows = 0;
        return num_sequences;
    }

    __device__ __forceinline__ void describe(Work& work, int sequence, int kv_head, int first_row) const {
        const int start = query_start[sequence];
        describe(work, {start, query_start[sequence + 1] - start, context_lens[sequence]}, kv_head, first_row);
    }

    __device__ __forceinline__ void describe(Work& work, const Chunk& chunk, int kv_head, int first_row) const {
        work.kv_head = kv_head;
        work.start = chunk.start;
        work.num_rows = chunk.num_tokens * GROUP;
        work.first_position = chunk.context_len - chunk.num_tokens;
        work.first_row = first_row;
        work.first_key = max(0, work.position(first_row) - window + 1);
        const int end = work.position(min(first_row + ROWS, work.num_rows) - 1) + 1;
        work.end_key = min(end, max(0, min(chunk.context_len, max_blocks * BLOCK_SIZE)));
    }

    // Narrows the keys to those of the part, in whole tiles; few keys make fewer parts.
    __device__ __forceinline__ void cut(Work& work, Part& part) const {
        const int num_tiles = work.num_tiles(), first = work.first_tile();
        part.count = min(part.count, max(1, num_tiles / MIN_PART_TILES));
        work.first_key = max(work.first_key, (first + part.index * num_tiles / part.count) * KEYS);
        work.end_key = min(work.end_key, (first + (part.index + 1) * num_tiles / part.count) * KEYS);
    }
};

struct Rows {
    float sum[HEAD_DIM / 2];
    float maximum[2];  // of the raw scores
    float total[2];    // of this thread's own keys

    __device__ __forceinline__ Rows() {
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; ++i) sum[i] = 0.0f;
        maximum[0] = maximum[1] = minus_infinity();
        total[0] = total[1] = 0.0f;
    }
};

// Minus infinity for the keys that a row does not see; `behind` tells how far the tile's first key lies behind the last
// key that the rows see, `seen` how many keys they see up to that one.
__device__ __forceinline__ void mask_tile(float (&score)[KEYS / 2], const int (&behind)[2], const int (&seen)[2]) {
#pragma unroll
    for (int i = 0; i < KEYS / 2; ++i) {
        const int distance = behind[i / 2 % 2] - (i / 4 * 8 + i % 2) - threadIdx.x % 4 * 2;
        if (static_cast<u32>(distance) >= static_cast<u32>(seen[i / 2 % 2])) score[i] = minus_infinity();
    }
}

// Turns scores into weights 2^((score - maximum) * scale_log2); the row's sums are to be multiplied by `correction`, to
// fit the new maximum. Two chains a row, so that one step need not wait for the one before.
__device__ __forceinline__ void weigh_scores(Rows& rows, float (&correction)[2], float (&score)[KEYS / 2],
                                             float scale_log2) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float top[2] = {rows.maximum[h], rows.maximum[h]}, part[2] = {};
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
            part[0] += score[i];
            part[1] += score[i + 1];
        }
        rows.total[h] = fmaf(rows.total[h], correction[h], part[0] + part[1]);
    }
}

__device__ __forceinline__ void rescale_sums(Rows& rows, const float (&correction)[2]) {
    // Most tiles bring no new maximum to any row of the warp.
    if (!__any_sync(FULL_WARP, correction[0] != 1.0f || correction[1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) rows.sum[i] *= correction[i / 2 % 2];
}

// Both, where no product with values is under way.
__device__ __forceinline__ void weigh_tile(Rows& rows, float (&score)[KEYS / 2], float scale_log2) {
    float correction[2];
    weigh_scores(rows, correction, score, scale_log2);
    rescale_sums(rows, correction);
}

// To the operand that the product with the values takes from registers.
__device__ __forceinline__ void pack_weights(u32 (&weights)[KEYS / 16][4], const float (&score)[KEYS / 2]) {
#pragma unroll
    for (int i = 0; i < KEYS / 4; ++i) weights[i / 4][i % 4] = pack_pair(score[2 * i], score[2 * i + 1]);
}

// Lane t of four gets pair[t] of each, in the lanes' order: eight columns side by side.
__device__ __forceinline__ uint4 gather_pairs(const u32 (&pair)[4]) {
    const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
    const u32 low = __shfl_xor_sync(FULL_WARP, odd ? pair[0] : pair[1], 1);
    const u32 high = __shfl_xor_sync(FULL_WARP, odd ? pair[2] : pair[3], 1);
    const u32 near[4] = {odd ? low : pair[0], odd ? pair[1] : low, odd ? high : pair[2], odd ? pair[3] : high};
    const u32 first = __shfl_xor_sync(FULL_WARP, upper ? near[0] : near[2], 2);
    const u32 second = __shfl_xor_sync(FULL_WARP, upper ? near[1] : near[3], 2);
    return upper ? make_uint4(first, second, near[2], near[3]) : make_uint4(near[0], near[1], first, second);
}

// Of the lanes that hold one row.
__device__ __forceinline__ float sum_of_four(float x) {
    x += __shfl_xor_sync(FULL_WARP, x, 1);
    return x + __shfl_xor_sync(FULL_WARP, x, 2);
}

__device__ __forceinline__ void store_rows(const Rows& rows, T* out, const Work& work, int first_row,
                                           int num_kv_heads) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const float scale = reciprocal_or_zero(sum_of_four(rows.total[h]));
        const int row = first_row + 8 * h;
        T* to = out + work.head(row, num_kv_heads) * HEAD_DIM + threadIdx.x % 4 * 8;
        const bool is_mine = work.holds(row);
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

constexpr int COLUMNS = HEAD_DIM / 64;  // of 64 elements, 128 bytes: a row of shared memory
constexpr int QUERY_COLUMN_BYTES = PADDED_ROWS * 128;
constexpr int KEY_COLUMN_BYTES = KEYS * 128;
constexpr int QUERY_BYTES = COLUMNS * QUERY_COLUMN_BYTES;
constexpr int TILE_BYTES = COLUMNS * KEY_COLUMN_BYTES;
constexpr int BLOCK_KEYS = at_most(KEYS, BLOCK_SIZE);  // keys of a tile that one block holds
constexpr int NUM_IDS = KEYS / BLOCK_KEYS;
static_assert(NUM_IDS <= WARP_SIZE, "a lane knows one block of a tile");

// The pool as the producer sees it: rows of the cache map.
struct Pool {
    int num_blocks, block_rows, layer_row, value_rows;

    __device__ __forceinline__ Pool(int num_blocks, int num_layers, int layer, int num_kv_heads)
        : num_blocks(num_blocks) {
        value_rows = num_kv_heads * BLOCK_SIZE;
        block_rows = 2 * num_layers * value_rows;
        layer_row = 2 * layer * value_rows;
    }

    // Of the keys from `first` on, which lie in one block; behind the map's end for a block that is not there.
    __device__ __forceinline__ int row(int block_id, int kv_head, int first) const {
        const bool is_there = static_cast<u32>(block_id) < static_cast<u32>(num_blocks);
        return is_there ? block_id * block_rows + layer_row + kv_head * BLOCK_SIZE + first % BLOCK_SIZE
                        : num_blocks * block_rows;
    }
};

// A warp fetches a tile, whose boxes begin in the rows that its lanes say.
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
    for (int k = 0; k < KEYS / 16; ++k) multiply(rows.sum, weights[k], b + k * 16 * 128 / 16);
    commit_products();
}

// A warp is done with what the barrier guards.
__device__ __forceinline__ void release(u32 barrier) {
    __syncwarp();
    if (threadIdx.x % WARP_SIZE == 0) arrive(barrier);
}
