// How prefill attention of several chunks is cut into pieces of work, and how a ticket names a piece: for grids of
// fewer blocks than pieces, which draw tickets until there are no more.
//
// A piece is ROWS query rows of one kv head: row r is query head r % GROUP of the chunk's token r / GROUP. Tickets run
// through the kv heads of a piece, then through a chunk's pieces, the longest first, then through the sequences. Where
// a warp's lanes see all sequences and the grid has several blocks for each piece, these share its keys: tickets then
// run through the first part of every piece, then through the second parts.
#pragma once

#include "attention/attention.cuh"
#include "common/types.cuh"

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
