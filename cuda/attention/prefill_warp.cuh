// What a warp does in prefill attention before Hopper: scores of its query rows and a tile of keys become weights, and
// these the sums of values; by mma.sync, from tiles that lie in shared memory as SharedTile lays them.
//
// A build defines KEYS (of a tile) and ROW_TILES (of a warp, sixteen rows each) besides what attention.cuh needs.
#pragma once

#include "attention/attention.cuh"
#include "common/mma.cuh"
#include "common/types.cuh"

// One CTA's share of a chunk.
struct Chunk {
    int start, num_rows;  // first token of the chunk in q and out; tokens * GROUP
    int first_position;   // of the chunk's first token in its sequence
    int first_row;        // of this CTA

    __device__ __forceinline__ int position(int row) const { return first_position + row / GROUP; }

    // Where a row of this kv head begins in q and out, in elements.
    __device__ __forceinline__ i64 element(int row, int kv_head, int num_kv_heads) const {
        const i64 token = start + row / GROUP;
        return ((token * num_kv_heads + kv_head) * GROUP + row % GROUP) * HEAD_DIM;
    }
};

#if QUIRE_DTYPE != 0

constexpr int WARP_ROWS = 16 * ROW_TILES;
constexpr int STEPS = HEAD_DIM / 16;
constexpr int KEY_STEPS = KEYS / 16;

// Rows of this thread's fragments, in units of 8: half h of row tile r is row 16 r + 8 h + lane / 4 of the warp.
struct WarpState {
    float sum[ROW_TILES][2 * STEPS][4];
    float maximum[ROW_TILES][2];  // of the raw scores
    float total[ROW_TILES][2];    // of this thread's own keys
};

// score = Q K^T of this warp's rows and one tile of keys.
__device__ __forceinline__ void score_tile(float (&score)[ROW_TILES][2 * KEY_STEPS][4], u32 warp_queries,
                                           u32 key_tile) {
    const int lane = threadIdx.x % WARP_SIZE;
    const u32 query_from = warp_queries + SharedTile::offset(lane % 16, lane / 16);
    const u32 key_from = key_tile + SharedTile::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
    for (int k = 0; k < STEPS; ++k) {
        u32 rows[ROW_TILES][4];
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r)
            load_matrices(rows[r], SharedTile::right_of(query_from, k) + r * 16 * SharedTile::ROW_BYTES);
#pragma unroll
        for (int n = 0; n < KEY_STEPS; ++n) {
            u32 keys[4];
            load_matrices(keys, SharedTile::right_of(key_from, k) + n * 16 * SharedTile::ROW_BYTES);
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r) {
                mma_16x8x16(score[r][2 * n], rows[r], keys[0], keys[1]);
                mma_16x8x16(score[r][2 * n + 1], rows[r], keys[2], keys[3]);
            }
        }
    }
}

// Minus infinity for the keys that a row does not see.
__device__ __forceinline__ void mask_tile(float (&score)[ROW_TILES][2 * KEY_STEPS][4], const Chunk& chunk, int warp_row,
                                          int first_key, int window) {
    const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int last = chunk.position(warp_row + r * 16 + h * 8 + lane / 4) - first_key - lane % 4 * 2;
#pragma unroll
            for (int n = 0; n < 2 * KEY_STEPS; ++n) {
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const int behind = last - (n * 8 + j);  // how far the key lies behind the query
                    if (behind < 0 || behind >= window) score[r][n][2 * h + j] = minus_infinity();
                }
            }
        }
    }
}

// Turns scores into weights 2^((score - maximum) * scale_log2) and rescales what `state` holds to the new maximum.
__device__ __forceinline__ void weigh_tile(WarpState& state, float (&score)[ROW_TILES][2 * KEY_STEPS][4],
                                           float scale_log2) {
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
        float correction[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float best = state.maximum[r][h];
#pragma unroll
            for (int n = 0; n < 2 * KEY_STEPS; ++n)
                best = fmaxf(best, fmaxf(score[r][n][2 * h], score[r][n][2 * h + 1]));
            best = fmaxf(best, __shfl_xor_sync(FULL_WARP, best, 1));
            best = fmaxf(best, __shfl_xor_sync(FULL_WARP, best, 2));
            const float base = finite_base(best) * scale_log2;
            correction[h] = exp2_approx(state.maximum[r][h] * scale_log2 - base);
            state.maximum[r][h] = best;
            float total = 0.0f;
#pragma unroll
            for (int n = 0; n < 2 * KEY_STEPS; ++n) {
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const float weight = exp2_approx(fmaf(score[r][n][2 * h + j], scale_log2, -base));
                    score[r][n][2 * h + j] = weight;
                    total += weight;
                }
            }
            state.total[r][h] = fmaf(state.total[r][h], correction[h], total);
        }
        // Most tiles bring no new maximum to any row of the warp.
        if (!__any_sync(FULL_WARP, correction[0] != 1.0f || correction[1] != 1.0f)) continue;
#pragma unroll
        for (int n = 0; n < 2 * STEPS; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) state.sum[r][n][i] *= correction[i / 2];
        }
    }
}

// state.sum += weights V.
__device__ __forceinline__ void add_values(WarpState& state, const float (&weights)[ROW_TILES][2 * KEY_STEPS][4],
                                           u32 value_tile) {
    const int lane = threadIdx.x % WARP_SIZE;
    const u32 from = value_tile + SharedTile::offset(lane % 16, lane / 16);
#pragma unroll
    for (int k = 0; k < KEY_STEPS; ++k) {
        u32 rows[ROW_TILES][4];
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float(&pair)[4] = weights[r][2 * k + i / 2];
                rows[r][i] = pack_pair(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
            }
        }
#pragma unroll
        for (int n = 0; n < STEPS; ++n) {
            u32 values[4];
            load_matrices_transposed(values, SharedTile::right_of(from, n) + k * 16 * SharedTile::ROW_BYTES);
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r) {
                mma_16x8x16(state.sum[r][2 * n], rows[r], values[0], values[1]);
                mma_16x8x16(state.sum[r][2 * n + 1], rows[r], values[2], values[3]);
            }
        }
    }
}

#endif
