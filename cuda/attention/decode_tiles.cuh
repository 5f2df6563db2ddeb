// A warp's step of decode attention: TILE tokens' keys and values from the cache to shared memory, and from there by
// tensor cores into what the warp knows of its query rows.
//
// Tokens are the M of the products, query rows their N, eight rows a Q_TILE: S^T = K Q^T, O^T = V^T P^T. A build defines
// STAGES, WARPS and SHARED_BYTES besides what attention.cuh needs. For fp16 and bf16.
#pragma once

#include "attention/attention.cuh"
#include "attention/decode_parts.cuh"
#include "common/mma.cuh"
#include "common/types.cuh"

#if QUIRE_DTYPE != 0

constexpr int STEPS = HEAD_DIM / 16;
constexpr int TILE_BYTES = TILE * SharedTile::ROW_BYTES;
constexpr int HALF_CHUNKS = TILE / 2 * SharedTile::CHUNKS;
static_assert(SHARED_BYTES == WARPS * STAGES * 2 * TILE_BYTES, "the launcher's tile sizes are not these");

// Query rows of this thread's fragments are 8 n + 2t and 8 n + 2t + 1: element [n][.] of each pair below.
template <int Q_TILES>
struct WarpState {
    float sum[Q_TILES][STEPS][4];
    float maximum[Q_TILES][2];
    float total[Q_TILES][2];  // of this thread's own tokens
};

// The ids of the two blocks that hold a tile's two halves of 8 tokens (the same unless blocks are that small).
__device__ __forceinline__ int2 blocks_of_tile(const PagedHead& head, int tile) {
    const int block = tile * TILE / BLOCK_SIZE;
    if (BLOCK_SIZE >= TILE) {
        const int id = __ldg(head.entry(block));
        return make_int2(id, id);
    }
    return make_int2(__ldg(head.entry(block)), __ldg(head.entry(block + 1)));
}

// Starts the copy of a tile's keys and values; tokens outside first <= token < end become zeros and are not read.
__device__ __forceinline__ void copy_tile(u32 key_tile, const PagedHead& head, int2 ids, int tile, int first, int end) {
    const int lane = threadIdx.x % WARP_SIZE;
    const int at = tile * TILE % BLOCK_SIZE;
    const T* halves[2] = {head.key_at(ids.x, at), head.key_at(ids.y, BLOCK_SIZE >= TILE ? at + TILE / 2 : 0)};
    const bool held[2] = {head.holds(ids.x), head.holds(ids.y)};
    const int low = first - tile * TILE, high = end - tile * TILE;
#pragma unroll
    for (int i = 0; i < 2 * HALF_CHUNKS / WARP_SIZE; ++i) {
        const int chunk = lane + i * WARP_SIZE;
        const int half = chunk >= HALF_CHUNKS;
        const int row = chunk / SharedTile::CHUNKS;
        const u32 to = key_tile + SharedTile::offset(row, chunk % SharedTile::CHUNKS);
        const T* from = (half ? halves[1] : halves[0]) + (chunk - half * HALF_CHUNKS) * 8;
        const bool wanted = row >= low && row < high && (half ? held[1] : held[0]);
        copy_async_16(to, from, wanted);
        copy_async_16(to + TILE_BYTES, from + head.value_offset, wanted);
    }
}

// S^T = K Q^T of one tile; rows (tokens) outside low <= row < high get minus infinity.
template <int Q_TILES>
__device__ __forceinline__ void score_tile(float (&score)[Q_TILES][4], const u32 (&q)[Q_TILES][STEPS][2], u32 key_tile,
                                           int low, int high, float scale_log2) {
    const int lane = threadIdx.x % WARP_SIZE, g = lane / 4;
    float chain[2][Q_TILES][4] = {};  // two sums, so that one product need not wait for the one before
    const u32 from = key_tile + SharedTile::offset(lane % 16, lane / 16);
#pragma unroll
    for (int k = 0; k < STEPS; ++k) {
        u32 keys[4];
        load_matrices(keys, SharedTile::right_of(from, k));
#pragma unroll
        for (int n = 0; n < Q_TILES; ++n) mma_16x8x16(chain[k % 2][n], keys, q[n][k][0], q[n][k][1]);
    }
    const bool seen[2] = {g >= low && g < high, g + 8 >= low && g + 8 < high};
#pragma unroll
    for (int n = 0; n < Q_TILES; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            score[n][i] = seen[i / 2] ? (chain[0][n][i] + chain[1][n][i]) * scale_log2 : minus_infinity();
    }
}

// Turns the scores of one 8-row slice into fragments of P^T and rescales what `state` holds to the new maximum.
template <int Q_TILES>
__device__ __forceinline__ void weigh_tile(WarpState<Q_TILES>& state, int n, float (&score)[4], u32 (&weights)[2]) {
    float correction[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        float best = fmaxf(score[j], score[j + 2]);
#pragma unroll
        for (int offset = 4; offset < WARP_SIZE; offset *= 2)
            best = fmaxf(best, __shfl_xor_sync(FULL_WARP, best, offset));
        best = fmaxf(best, state.maximum[n][j]);
        const float base = finite_base(best);
        correction[j] = exp2_approx(state.maximum[n][j] - base);
        state.maximum[n][j] = best;
        score[j] = exp2_approx(score[j] - base);
        score[j + 2] = exp2_approx(score[j + 2] - base);
        state.total[n][j] = state.total[n][j] * correction[j] + score[j] + score[j + 2];
    }
    weights[0] = transpose_matrix(pack_pair(score[0], score[1]));
    weights[1] = transpose_matrix(pack_pair(score[2], score[3]));
#pragma unroll
    for (int m = 0; m < STEPS; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) state.sum[n][m][i] *= correction[i % 2];
    }
}

template <int Q_TILES>
__device__ __forceinline__ void attend_tile(WarpState<Q_TILES>& state, const u32 (&q)[Q_TILES][STEPS][2], u32 key_tile, int low,
                                            int high, float scale_log2) {
    const int lane = threadIdx.x % WARP_SIZE;
    float score[Q_TILES][4];
    score_tile(score, q, key_tile, low, high, scale_log2);
    u32 weights[Q_TILES][2];
#pragma unroll
    for (int n = 0; n < Q_TILES; ++n) weigh_tile(state, n, score[n], weights[n]);

    const u32 from = key_tile + TILE_BYTES + SharedTile::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
    for (int m = 0; m < STEPS; ++m) {
        u32 values[4];
        load_matrices_transposed(values, SharedTile::right_of(from, m));
#pragma unroll
        for (int n = 0; n < Q_TILES; ++n) mma_16x8x16(state.sum[n][m], values, weights[n][0], weights[n][1]);
    }
}

template <int Q_TILES, typename Rows>
__device__ __forceinline__ void load_queries(u32 (&fragments)[Q_TILES][STEPS][2], const Rows& rows) {
    const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
    for (int n = 0; n < Q_TILES; ++n) {
        const T* row = rows.at(n * 8 + lane / 4);
        const u32* pairs = reinterpret_cast<const u32*>(row) + lane % 4;
#pragma unroll
        for (int k = 0; k < STEPS; ++k) {
            fragments[n][k][0] = row != nullptr ? pairs[k * 8] : 0;
            fragments[n][k][1] = row != nullptr ? pairs[k * 8 + 4] : 0;
        }
    }
}

#endif
