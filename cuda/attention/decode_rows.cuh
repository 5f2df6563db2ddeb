// Decode attention of one query token per row over a KV split, for all paged_decode kernels.
// 16 bits: each warp streams 16-token tiles through its own STAGES of shared memory, without CTA barriers in the loop.
// S^T = K Q^T, O^T = V^T P^T: eight query rows cost one mma. fp32: CUDA cores, one query row per CTA.
#pragma once

#include "attention/kv_split.cuh"
#include "attention/paged_kv.cuh"
#include "common/mma.cuh"
#include "common/types.cuh"

// All query rows see a split to its end.
struct SameEnds {
    __device__ __forceinline__ bool holds(int, int, int) const { return true; }
};

#if QUIRE_DTYPE != 0

constexpr int STEPS = HEAD_DIM / 16;
constexpr int TILE_BYTES = TILE * KvTile::ROW_BYTES;
constexpr int HALF_CHUNKS = TILE / 2 * KvTile::CHUNKS;
constexpr int ELEMENTS = 16 / sizeof(Kv);
static_assert(SHARED_BYTES >= WARPS * STAGES * 2 * TILE_BYTES, "the launcher's tile sizes are not these");

// Element [n][j] belongs to query row 8 n + 2 t + j, t = lane % 4.
template <int Q_TILES>
struct WarpState {
    float sum[Q_TILES][STEPS][4];
    float maximum[Q_TILES][2];
    float total[Q_TILES][2];  // over this thread's tokens
};

template <int Q_TILES>
struct OwnEnds {
    int at[Q_TILES][2];

    __device__ __forceinline__ bool holds(int n, int j, int token) const { return token < at[n][j]; }
};

template <int Q_TILES>
struct ScoreScale {
#if SCALES_QUERIES
    float by[Q_TILES][2];

    __device__ __forceinline__ float of(int n, int j) const { return by[n][j]; }
#else
    float by;

    __device__ __forceinline__ float of(int, int) const { return by; }
#endif
};

__device__ __forceinline__ int2 blocks_of_tile(const PagedHead& head, int tile) {
    const int block = tile * TILE / BLOCK_SIZE;
    if (BLOCK_SIZE >= TILE) {
        const int id = __ldg(head.entry(block));
        return make_int2(id, id);
    }
    return make_int2(__ldg(head.entry(block)), __ldg(head.entry(block + 1)));
}

// Tokens outside first <= token < end are zero-filled, not read.
__device__ __forceinline__ void copy_tile(u32 key_tile, const PagedHead& head, int2 ids, int tile, int first, int end) {
    const int lane = threadIdx.x % WARP_SIZE;
    const int at = tile * TILE % BLOCK_SIZE;
    const Kv* halves[2] = {head.key_at(ids.x, at), head.key_at(ids.y, BLOCK_SIZE >= TILE ? at + TILE / 2 : 0)};
    const bool held[2] = {head.holds(ids.x), head.holds(ids.y)};
    const int low = first - tile * TILE, high = end - tile * TILE;
#pragma unroll
    for (int i = 0; i < ceil_div(2 * HALF_CHUNKS, WARP_SIZE); ++i) {
        const int chunk = lane + i * WARP_SIZE;
        if (2 * HALF_CHUNKS % WARP_SIZE != 0 && chunk >= 2 * HALF_CHUNKS) break;
        const int half = chunk >= HALF_CHUNKS;
        const int row = chunk / KvTile::CHUNKS;
        const u32 to = key_tile + KvTile::offset(row, chunk % KvTile::CHUNKS);
        const Kv* from = (half ? halves[1] : halves[0]) + (chunk - half * HALF_CHUNKS) * ELEMENTS;
        const bool wanted = row >= low && row < high && (half ? held[1] : held[0]);
        copy_async_16(to, from, wanted);
        copy_async_16(to + TILE_BYTES, from + head.value_offset, wanted);
    }
}

#if QUIRE_KV_FP8

// Lane 4g + t holds bytes 4t .. 4t + 3 of a chunk's row g: as keys, columns 2t, 2t + 1, 2t + 8, 2t + 9 (queries are
// permuted alike); as values, rows g and g + 8 are dimensions 2g and 2g + 1.
__device__ __forceinline__ u32 chunk_pair(u32 tile, int row, int right, int pair) {
    const bool is_last_alone = KvTile::CHUNKS % 2 == 1 && pair == KvTile::CHUNKS / 2;
    return KvTile::right_of(tile + KvTile::offset(row, is_last_alone ? 0 : right), pair);
}

// Chunks 2 pair and 2 pair + 1; the second is garbage past the last chunk.
__device__ __forceinline__ void load_keys(u32 (&keys)[2][4], u32 tile, int pair) {
    const int lane = threadIdx.x % WARP_SIZE;
    u32 raw[4];
    load_matrices(raw, chunk_pair(tile, lane % 16, lane / 16, pair));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        keys[i / 2][i % 2] = e4m3_to_f16<0>(raw[i]);
        keys[i / 2][i % 2 + 2] = e4m3_to_f16<1>(raw[i]);
    }
}

__device__ __forceinline__ void load_values(u32 (&values)[2][4], u32 tile, int pair) {
    const int lane = threadIdx.x % WARP_SIZE;
    u32 raw[4];
    load_matrices_transposed(raw, chunk_pair(tile, lane % 8 + lane / 16 * 8, lane / 8 % 2, pair));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 by_dim = __byte_perm(raw[i], 0, 0x3120);  // two tokens of dimension 2g, then two of 2g + 1
        values[i % 2][i / 2 * 2] = e4m3_to_f16<0>(by_dim);
        values[i % 2][i / 2 * 2 + 1] = e4m3_to_f16<1>(by_dim);
    }
}

#endif

// S^T = K Q^T, masked outside low <= row < high and past each query row's end.
template <int Q_TILES, typename Ends>
__device__ __forceinline__ void score_tile(float (&score)[Q_TILES][4], const u32 (&q)[Q_TILES][STEPS][2], u32 key_tile,
                                           int low, int high, const Ends& ends, int first_token,
                                           const ScoreScale<Q_TILES>& scale) {
    const int lane = threadIdx.x % WARP_SIZE, g = lane / 4;
    float chain[2][Q_TILES][4] = {};
#if QUIRE_KV_FP8
    u32 keys[2][4];
#pragma unroll
    for (int k = 0; k < STEPS; ++k) {
        if (k % 2 == 0) load_keys(keys, key_tile, k / 2);
#pragma unroll
        for (int n = 0; n < Q_TILES; ++n) mma_16x8x16(chain[k % 2][n], keys[k % 2], q[n][k][0], q[n][k][1]);
    }
#else
    const u32 from = key_tile + KvTile::offset(lane % 16, lane / 16);
#pragma unroll
    for (int k = 0; k < STEPS; ++k) {
        u32 keys[4];
        load_matrices(keys, KvTile::right_of(from, k));
#pragma unroll
        for (int n = 0; n < Q_TILES; ++n) mma_16x8x16(chain[k % 2][n], keys, q[n][k][0], q[n][k][1]);
    }
#endif
    const bool visible[2] = {g >= low && g < high, g + 8 >= low && g + 8 < high};
#pragma unroll
    for (int n = 0; n < Q_TILES; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const bool is_visible = visible[i / 2] && ends.holds(n, i % 2, first_token + g + i / 2 * 8);
            score[n][i] = is_visible ? (chain[0][n][i] + chain[1][n][i]) * scale.of(n, i % 2) : minus_infinity();
        }
    }
}

// Online softmax: turns scores into P^T fragments, rescales the state to the new maximum.
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
    weights[0] = transpose_matrix(pack_operand(score[0], score[1]));
    weights[1] = transpose_matrix(pack_operand(score[2], score[3]));
#pragma unroll
    for (int m = 0; m < STEPS; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) state.sum[n][m][i] *= correction[i % 2];
    }
}

template <int Q_TILES, typename Ends>
__device__ __forceinline__ void attend_tile(WarpState<Q_TILES>& state, const u32 (&q)[Q_TILES][STEPS][2], u32 key_tile,
                                            int low, int high, const Ends& ends, int first_token,
                                            const ScoreScale<Q_TILES>& scale) {
    float score[Q_TILES][4];
    score_tile(score, q, key_tile, low, high, ends, first_token, scale);
    u32 weights[Q_TILES][2];
#pragma unroll
    for (int n = 0; n < Q_TILES; ++n) weigh_tile(state, n, score[n], weights[n]);

#if QUIRE_KV_FP8
    u32 values[2][4];
#pragma unroll
    for (int m = 0; m < STEPS; ++m) {
        if (m % 2 == 0) load_values(values, key_tile + TILE_BYTES, m / 2);
#pragma unroll
        for (int n = 0; n < Q_TILES; ++n) mma_16x8x16(state.sum[n][m], values[m % 2], weights[n][0], weights[n][1]);
    }
#else
    const int lane = threadIdx.x % WARP_SIZE;
    const u32 from = key_tile + TILE_BYTES + KvTile::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
    for (int m = 0; m < STEPS; ++m) {
        u32 values[4];
        load_matrices_transposed(values, KvTile::right_of(from, m));
#pragma unroll
        for (int n = 0; n < Q_TILES; ++n) mma_16x8x16(state.sum[n][m], values, weights[n][0], weights[n][1]);
    }
#endif
}

template <int Q_TILES, typename Rows>
__device__ __forceinline__ void load_queries(u32 (&fragments)[Q_TILES][STEPS][2], const Rows& rows) {
    constexpr int SECOND = QUIRE_KV_FP8 ? 1 : 4;
    const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
    for (int n = 0; n < Q_TILES; ++n) {
        const T* row = rows.at(n * 8 + lane / 4);
        const u32* pairs = reinterpret_cast<const u32*>(row) + lane % 4 * (QUIRE_KV_FP8 ? 2 : 1);
#pragma unroll
        for (int k = 0; k < STEPS; ++k) {
            fragments[n][k][0] = row != nullptr ? pairs[k * 8] : 0;
            fragments[n][k][1] = row != nullptr ? pairs[k * 8 + SECOND] : 0;
        }
    }
}

#if SCALES_QUERIES
template <int Q_TILES>
__device__ __forceinline__ void scale_rows(u32 (&fragments)[Q_TILES][STEPS][2], ScoreScale<Q_TILES>& scale) {
    const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
    for (int n = 0; n < Q_TILES; ++n) {
        u32 largest = 0;
#pragma unroll
        for (int i = 0; i < 2 * STEPS; ++i) {
            const u32 pair = fragments[n][i / 2][i % 2];
            largest = max(largest, max(pair & 0x7fffu, pair >> 16 & 0x7fffu));
        }
        largest = max(largest, __shfl_xor_sync(FULL_WARP, largest, 1));
        largest = max(largest, __shfl_xor_sync(FULL_WARP, largest, 2));
        const QueryScale by(largest);
#pragma unroll
        for (int i = 0; i < 2 * STEPS; ++i) fragments[n][i / 2][i % 2] = by.scaled(fragments[n][i / 2][i % 2]);
#pragma unroll
        for (int j = 0; j < 2; ++j) scale.by[n][j] *= __shfl_sync(FULL_WARP, by.down, (lane % 4 * 2 + j) * 4);
    }
}
#endif

#endif

constexpr int THREADS = WARPS * WARP_SIZE;
constexpr int ROWS = QUIRE_DTYPE == 0 ? 1 : at_most(GROUP, 16);  // query rows per CTA
constexpr int SLICES = ceil_div(GROUP, ROWS);  // CTAs per kv head
constexpr int GROUP_ROWS = MEMBERS * ROWS;  // query rows of a group's CTA
#ifndef KEPT_STAGES
#define KEPT_STAGES 0  // ring stages that results do not overwrite
#endif
constexpr int SUM_STRIDE = HEAD_DIM + (KEPT_STAGES > 0 ? 0 : 4);  // avoids bank conflicts, as sum_place does
constexpr int MAX_PAIRS = 1 << 14;

// Splits written per (sequence, blockIdx.x); atomicInc wraps to 0 for the next launch.
__device__ u32 num_arrived[MAX_PAIRS];

// True in the last of `count` CTAs to arrive, which sees the others' writes.
__device__ __forceinline__ bool is_last_to_arrive(int pair, int count) {
    __threadfence();
    __syncthreads();
    const bool is_last = __syncthreads_or(threadIdx.x == 0 && atomicInc(&num_arrived[pair], count - 1) == count - 1);
    __threadfence();
    return is_last;
}

// Column of dimension d, swizzled within 32: kept tiles leave no room for padding.
__device__ __forceinline__ int sum_place(int row, int d) { return KEPT_STAGES > 0 ? d ^ row / 2 % 4 * 8 : d; }

// Per-warp results, which reuse the tiles' memory.
template <int NUM_ROWS>
struct Results {
    float sum[WARPS][NUM_ROWS][SUM_STRIDE];
    float2 stats[WARPS][NUM_ROWS];  // running maximum, total
};
static_assert(SHARED_BYTES >= sizeof(Results<QUIRE_DTYPE == 0 ? ROWS : GROUP_ROWS>), "the warps' results must fit");
static_assert(SHARED_BYTES >= ROWS * 2 * MAX_SPLITS * sizeof(float), "the weights of the splits must fit");

__device__ __forceinline__ void store_four(T* to, const float (&x)[4]) {
    struct alignas(4 * sizeof(T)) Four { T at[4]; } four;
#pragma unroll
    for (int i = 0; i < 4; ++i) four.at[i] = from_float<T>(x[i]);
    *reinterpret_cast<Four*>(to) = four;
}

// Merges the warps' results, weighted by 2^(own maximum - largest).
template <int NUM_ROWS, typename Destination>
__device__ __forceinline__ void merge_warps(const Results<NUM_ROWS>& results, const Destination& destination) {
    for (int i = threadIdx.x; i < NUM_ROWS * (HEAD_DIM / 4); i += THREADS) {
        const int row = i / (HEAD_DIM / 4), d = i % (HEAD_DIM / 4) * 4;
        if (!destination.holds(row)) continue;
        float maximum = minus_infinity(), total = 0.0f, sum[4] = {};
#pragma unroll
        for (int w = 0; w < WARPS; ++w) maximum = fmaxf(maximum, results.stats[w][row].x);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float weight = exp2_approx(results.stats[w][row].x - finite_base(maximum));
            total += weight * results.stats[w][row].y;
#pragma unroll
            for (int j = 0; j < 4; ++j) sum[j] += weight * results.sum[w][row][sum_place(row, d) + j];
        }
        destination.store(row, d, sum, maximum, total);
    }
}

struct OutputRows {
    T* out;
    int num_rows;
    float value_scale;

    __device__ __forceinline__ bool holds(int row) const { return row < num_rows; }
    __device__ __forceinline__ void store(int row, int d, float (&sum)[4], float, float total) const {
        const float scale = reciprocal_or_zero(total) * value_scale;
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[j] *= scale;
        store_four(out + row * HEAD_DIM + d, sum);
    }
};

struct WorkspaceRows {
    float* sums;
    float2* stats;
    int num_rows;

    __device__ __forceinline__ bool holds(int row) const { return row < num_rows; }
    __device__ __forceinline__ void store(int row, int d, const float (&sum)[4], float maximum, float total) const {
        store_partial(row, d, sum, maximum, total);
    }
    __device__ __forceinline__ void store_partial(i64 row, int d, const float (&sum)[4], float maximum,
                                                  float total) const {
        *reinterpret_cast<float4*>(sums + row * HEAD_DIM + d) = make_float4(sum[0], sum[1], sum[2], sum[3]);
        if (d == 0) stats[row] = make_float2(maximum, total);
    }
};

// Combines splits that are `stride` workspace rows apart. `weights`: shared float[ROWS][count].
__device__ __forceinline__ void combine_splits(const float* sums, const float2* stats, int num_rows, int count,
                                              int stride, float* weights, float value_scale, T* out) {
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    for (int row = warp; row < num_rows; row += WARPS) {
        const float2* splits = stats + row;
        float maximum = minus_infinity(), total = 0.0f;
        for (int i = lane; i < count; i += WARP_SIZE) maximum = fmaxf(maximum, __ldcg(splits + i * stride).x);
        const float base = finite_base(warp_max(maximum));
        for (int i = lane; i < count; i += WARP_SIZE) {
            const float2 split = __ldcg(splits + i * stride);
            const float weight = exp2_approx(split.x - base);
            weights[row * count + i] = weight;
            total += weight * split.y;
        }
        const float scale = reciprocal_or_zero(warp_sum(total)) * value_scale;
        for (int i = lane; i < count; i += WARP_SIZE) weights[row * count + i] *= scale;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < num_rows * (HEAD_DIM / 4); i += THREADS) {
        const int row = i / (HEAD_DIM / 4), d = i % (HEAD_DIM / 4) * 4;
        const float* from = sums + row * HEAD_DIM + d;
        float sum[4] = {};
#pragma unroll 8
        for (int split = 0; split < count; ++split) {
            const float weight = weights[row * count + split];
            const float4 x =
                __ldcg(reinterpret_cast<const float4*>(from + static_cast<i64>(split) * stride * HEAD_DIM));
            sum[0] += weight * x.x, sum[1] += weight * x.y, sum[2] += weight * x.z, sum[3] += weight * x.w;
        }
        store_four(out + row * HEAD_DIM + d, sum);
    }
}

#if QUIRE_DTYPE == 0

__device__ __forceinline__ void attend(const T* q, const PagedHead& head, const KvSplit& split, float scale_log2,
                                       Results<ROWS>& results) {
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    RowState state;
    attend_row(state, q, head, max(split.first, split.begin) + warp * WARP_SIZE, split.end, THREADS, scale_log2);
#pragma unroll
    for (int i = 0; i < RowState::DIMS; ++i) {
        const int d = lane + i * WARP_SIZE;
        if (d < HEAD_DIM) results.sum[warp][0][d] = state.sum[i];
    }
    if (lane == 0) results.stats[warp][0] = make_float2(state.maximum, state.total);
}

#else

// Overwrites the tiles.
template <int Q_TILES, int NUM_ROWS>
__device__ __forceinline__ void store_state(const WarpState<Q_TILES>& state, Results<NUM_ROWS>& results) {
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
#pragma unroll
    for (int n = 0; n < Q_TILES; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int row = n * 8 + lane % 4 * 2 + j;
            float total = state.total[n][j];
#pragma unroll
            for (int offset = 4; offset < WARP_SIZE; offset *= 2) total += __shfl_xor_sync(FULL_WARP, total, offset);
            if (row >= NUM_ROWS) continue;
            if (lane < 4) results.stats[warp][row] = make_float2(state.maximum[n][j], total);
#pragma unroll
            for (int m = 0; m < STEPS; ++m) {
                const int d = m * 16 + lane / 4 * (QUIRE_KV_FP8 ? 2 : 1);
                results.sum[warp][row][sum_place(row, d)] = state.sum[n][m][j];
                results.sum[warp][row][sum_place(row, d + (QUIRE_KV_FP8 ? 1 : 8))] = state.sum[n][m][j + 2];
            }
        }
    }
}

// A warp's ring of tiles of a split. Tokens from `copied_end` on are not copied.
struct TileRing {
    u32 ring;
    int tile, num_tiles, first, copied_end;
    int2 next_ids;

    // Starts the first copies.
    __device__ __forceinline__ TileRing(unsigned char* tiles, const PagedHead& head, const KvSplit& split,
                                        int copied_end)
        : num_tiles(ceil_div(split.end, TILE)), first(split.first), copied_end(copied_end) {
        const int warp = threadIdx.x / WARP_SIZE;
        ring = shared_address(tiles) + warp * (STAGES * 2 * TILE_BYTES);
        tile = split.begin / TILE + warp;
        int2 ids[STAGES];
#pragma unroll
        for (int i = 0; i < STAGES; ++i) ids[i] = blocks_of_tile(head, tile + i * WARPS);
        next_ids = blocks_of_tile(head, tile + STAGES * WARPS);
#pragma unroll
        for (int i = 0; i < STAGES; ++i) {
            const int ahead = tile + i * WARPS;
            if (ahead < num_tiles) copy_tile(ring + i * 2 * TILE_BYTES, head, ids[i], ahead, first, copied_end);
            commit_copies();
        }
    }
};

// The cache holds all tokens of the split.
struct NoNewToken {
    __device__ __forceinline__ void place(u32, int) const {}
};

template <int NUM_ROWS, typename Rows, typename NewToken>
__device__ __forceinline__ void attend(TileRing& tiles, const Rows& rows, const PagedHead& head, const KvSplit& split,
                                       float scale_log2, Results<NUM_ROWS>& results, const NewToken& new_token) {
    constexpr int Q_TILES = ceil_div(NUM_ROWS, 8);
    u32 fragments[Q_TILES][STEPS][2];
    load_queries(fragments, rows);
    ScoreScale<Q_TILES> scale;
#if SCALES_QUERIES
#pragma unroll
    for (int n = 0; n < Q_TILES; ++n) scale.by[n][0] = scale.by[n][1] = scale_log2;
    scale_rows(fragments, scale);
#else
    scale.by = scale_log2;
#endif
    const auto ends = rows.template ends<Q_TILES>();
    WarpState<Q_TILES> state = {};
#pragma unroll
    for (int n = 0; n < Q_TILES; ++n) state.maximum[n][0] = state.maximum[n][1] = minus_infinity();

    int tile = tiles.tile;
    for (u32 stage = 0; tile < tiles.num_tiles; tile += WARPS) {
        const u32 at = tiles.ring + stage * 2 * TILE_BYTES;
        wait_for_copies<STAGES - 1>();
        __syncwarp();
        new_token.place(at, tile);
        attend_tile(state, fragments, at, split.first - tile * TILE, split.end - tile * TILE, ends, tile * TILE, scale);
        __syncwarp();
        const int ahead = tile + STAGES * WARPS;
        if (ahead < tiles.num_tiles) copy_tile(at, head, tiles.next_ids, ahead, tiles.first, tiles.copied_end);
        commit_copies();
        tiles.next_ids = blocks_of_tile(head, ahead + WARPS);  // early: the copy must not wait
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    wait_for_copies<0>();
    __syncthreads();
    store_state(state, results);
}

template <int NUM_ROWS, typename Rows>
__device__ __forceinline__ void attend(const Rows& rows, const PagedHead& head, const KvSplit& split, float scale_log2,
                                       Results<NUM_ROWS>& results, unsigned char* tiles) {
    TileRing ring(tiles, head, split, split.end);
    attend(ring, rows, head, split, scale_log2, results, NoNewToken{});
}

#endif

#if QUIRE_KV_FP8
#define LAUNCH_BOUNDS __launch_bounds__(THREADS, CTAS_PER_SM)
#else
#define LAUNCH_BOUNDS __launch_bounds__(THREADS)
#endif
