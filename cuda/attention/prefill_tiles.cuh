// Tiles of keys and values on Hopper: their way from the paged cache into shared memory, box by box, and the product of
// weights and values.
//
// A build defines KEYS (of a tile) and PADDED_ROWS besides what attention.cuh needs. The cache map is kv as rows of
// HEAD_DIM, with boxes of 64 elements x BLOCK_KEYS rows, in the 128-byte swizzle.
#pragma once

#include "attention/attention.cuh"
#include "attention/prefill_rows.cuh"
#include "common/types.cuh"
#include "common/wgmma.cuh"

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
