// paged_prefill: causal GQA FlashAttention of several sequences' chunks over the paged KV cache, with mma.sync.
//
//   q, out [T, Hq, HEAD_DIM]; kv and kv_scales as in paged_decode; block_tables int32 [S, max_blocks]; context_lens
//   int32 [S]; query_start int32 [S + 1]; arrays aligned to 16 bytes; max_blocks, scale, window > 0; max_query_len >=
//   the longest chunk
//   grid (Hkv, S, ceil(max_query_len * GROUP / ROWS)), block 32 WARPS, shared memory SHARED_BYTES
//   reference: NumpyOps.paged_prefill_attention
//   Rows without visible keys are zeros; block ids outside the pool read as zeros.
//   roofline: 4 * HEAD_DIM flop per visible (query, key) pair and head; on an H200 300 TFLOP/s in bf16 at 4k
//
// A CTA computes ROWS query rows of a kv head: row r is query head r % GROUP of the chunk's token r / GROUP. blockIdx.z
// counts from the chunk's end, longest tiles first. Tiles of KEYS tokens are fetched one ahead, block ids two. A warp
// has 16 * ROW_TILES rows; two row tiles halve its shared-memory reads per product. fp32: CUDA cores, one warp per row.
#include "attention/paged_kv.cuh"
#include "common/mma.cuh"
#include "common/types.cuh"

struct Chunk {
    int start, num_rows;  // first token in q and out; tokens * GROUP
    int first_position;  // of the chunk in its sequence
    int first_row;

    __device__ __forceinline__ int position(int row) const { return first_position + row / GROUP; }

    __device__ __forceinline__ i64 element(int row, int kv_head, int num_kv_heads) const {
        const i64 token = start + row / GROUP;
        return ((token * num_kv_heads + kv_head) * GROUP + row % GROUP) * HEAD_DIM;
    }
};

#if QUIRE_DTYPE != 0

constexpr int WARP_ROWS = 16 * ROW_TILES;
constexpr int STEPS = HEAD_DIM / 16;
constexpr int KEY_STEPS = KEYS / 16;

// Half h of row tile r is row 16 r + 8 h + lane / 4 of the warp.
struct WarpState {
    float sum[ROW_TILES][2 * STEPS][4];
    float maximum[ROW_TILES][2];  // of raw scores
    float total[ROW_TILES][2];  // over this thread's keys
};

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
                    const int distance = last - (n * 8 + j);  // from key to query
                    if (distance < 0 || distance >= window) score[r][n][2 * h + j] = minus_infinity();
                }
            }
        }
    }
}

// Online softmax: scores become weights 2^((score - maximum) * scale_log2).
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
        if (!__any_sync(FULL_WARP, correction[0] != 1.0f || correction[1] != 1.0f)) continue;
#pragma unroll
        for (int n = 0; n < 2 * STEPS; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) state.sum[r][n][i] *= correction[i / 2];
        }
    }
}

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
                rows[r][i] = pack_operand(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
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

constexpr int THREADS = WARPS * WARP_SIZE;

#if QUIRE_DTYPE == 0

constexpr int ROWS = WARPS * 16 * ROW_TILES;

__device__ __forceinline__ void attend(T* out, const T* q, const PagedHead& head, const Chunk& chunk, int kv_head,
                                       int num_kv_heads, int context_len, float scale_log2, float value_scale,
                                       int window) {
    const int lane = threadIdx.x % WARP_SIZE;
    const int end = min(chunk.first_row + ROWS, chunk.num_rows);
    for (int row = chunk.first_row + threadIdx.x / WARP_SIZE; row < end; row += WARPS) {
        const int position = chunk.position(row);
        const i64 at = chunk.element(row, kv_head, num_kv_heads);
        RowState state;
        attend_row(state, q + at, head, max(0, position - window + 1), min(position + 1, context_len), WARP_SIZE,
                   scale_log2);
        const float scale = reciprocal_or_zero(state.total) * value_scale;
#pragma unroll
        for (int i = 0; i < RowState::DIMS; ++i) {
            const int d = lane + i * WARP_SIZE;
            if (d < HEAD_DIM) out[at + d] = state.sum[i] * scale;
        }
    }
}

#else

constexpr int ROWS = WARPS * WARP_ROWS;
constexpr int NUM_IDS = ceil_div(KEYS, BLOCK_SIZE);
constexpr int BLOCK_KEYS = at_most(KEYS, BLOCK_SIZE);
constexpr int TILE_BYTES = KEYS * SharedTile::ROW_BYTES;
constexpr int QUERY_BYTES = ROWS * SharedTile::ROW_BYTES;
constexpr int IDS_BYTES = 64;
static_assert(KEYS % BLOCK_SIZE == 0 || BLOCK_SIZE % KEYS == 0, "tiles and blocks must nest");
static_assert(NUM_IDS * 4 <= IDS_BYTES, "a tile's block ids must fit");
static_assert(WARP_ROWS * SharedTile::CHUNKS % WARP_SIZE == 0, "every lane copies the same number of chunks");
static_assert(SHARED_BYTES == QUERY_BYTES + 4 * TILE_BYTES + 2 * IDS_BYTES, "the launcher's tile sizes are not these");

// Query rows (later the output), two stages of (keys, values), block ids. e4m3: two stages of bytes replace stage 1.
struct Shared {
    unsigned char* base;

    __device__ __forceinline__ u32 queries() const { return shared_address(base); }
    __device__ __forceinline__ u32 keys(int stage) const {
        return shared_address(base) + QUERY_BYTES + (QUIRE_KV_FP8 ? 0 : stage) * 2 * TILE_BYTES;
    }
#if QUIRE_KV_FP8
    static constexpr int FETCHED_BYTES = KEYS * HEAD_DIM;
    static_assert(2 * FETCHED_BYTES <= TILE_BYTES, "two stages of bytes take the place of one of elements");

    __device__ __forceinline__ u32 fetched(int stage) const {
        return keys(0) + 2 * TILE_BYTES + stage * 2 * FETCHED_BYTES;
    }
#else
    __device__ __forceinline__ u32 fetched(int stage) const { return keys(stage); }
#endif
    __device__ __forceinline__ int* ids(int stage) const {
        return reinterpret_cast<int*>(base + QUERY_BYTES + 4 * TILE_BYTES + stage * IDS_BYTES);
    }
};

__device__ __forceinline__ void copy_queries(u32 queries, const T* q, const Chunk& chunk, int kv_head,
                                             int num_kv_heads) {
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
#pragma unroll 4
    for (int i = lane; i < WARP_ROWS * SharedTile::CHUNKS; i += WARP_SIZE) {
        const int row = warp * WARP_ROWS + i / SharedTile::CHUNKS, column = i % SharedTile::CHUNKS;
        const int of_chunk = chunk.first_row + row;
        const bool wanted = of_chunk < chunk.num_rows;
        const T* from = q + chunk.element(wanted ? of_chunk : chunk.first_row, kv_head, num_kv_heads) + column * 8;
        copy_async_16(queries + SharedTile::offset(row, column), from, wanted);
    }
}

__device__ __forceinline__ void copy_ids(int* ids, const PagedHead& head, int tile) {
    if (threadIdx.x >= NUM_IDS) return;
    copy_async_4(shared_address(ids + threadIdx.x), head.entry(tile * KEYS / BLOCK_SIZE + threadIdx.x));
}

// Tokens outside first <= token < end are zero-filled, not read.
__device__ __forceinline__ void copy_tile(u32 key_tile, const int* ids, const PagedHead& head, int tile, int first,
                                          int end) {
    const u32 low = first - tile * KEYS, num_wanted = max(0, end - first);
    const int in_block = tile * KEYS % BLOCK_SIZE;
#pragma unroll 4  // more would spill registers
    for (int block = 0; block < NUM_IDS; ++block) {
        const int id = ids[block];
        const Kv* keys = head.key_at(id, in_block);
#pragma unroll
        for (int i = 0; i < ceil_div(BLOCK_KEYS * KvTile::CHUNKS, THREADS); ++i) {
            const u32 at = threadIdx.x + i * THREADS;
            const u32 row = at / KvTile::CHUNKS;
            if (row >= BLOCK_KEYS) break;
            const bool wanted = head.holds(id) && block * BLOCK_KEYS + row - low < num_wanted;
#if QUIRE_KV_FP8
            const u32 to = key_tile + block * BLOCK_KEYS * HEAD_DIM + at * 16;
            copy_async_16(to, keys + at * 16, wanted);
            copy_async_16(to + KEYS * HEAD_DIM, keys + at * 16 + head.value_offset, wanted);
#else
            const u32 to = key_tile + SharedTile::offset(row, at % SharedTile::CHUNKS) +
                           block * BLOCK_KEYS * SharedTile::ROW_BYTES;
            copy_async_16(to, keys + at * 8, wanted);
            copy_async_16(to + TILE_BYTES, keys + at * 8 + head.value_offset, wanted);
#endif
        }
    }
}

#if QUIRE_KV_FP8
__device__ __forceinline__ void widen_tile(u32 key_tile, u32 fetched) {
    constexpr int CHUNKS = SharedTile::CHUNKS, EIGHTS = KEYS * CHUNKS, STEPS = EIGHTS / THREADS, BATCH = 4;
    constexpr bool SAME_PLACE = THREADS % (8 * CHUNKS) == 0;
    static_assert(EIGHTS % THREADS == 0, "every thread widens the same number");
    const int thread = threadIdx.x;
    const u32 first = SharedTile::offset(thread / CHUNKS, thread % CHUNKS);
    const auto place = [&](int step) {
        const int at = thread + step * THREADS;
        return SAME_PLACE ? first + step * (THREADS / CHUNKS) * SharedTile::ROW_BYTES
                          : SharedTile::offset(at / CHUNKS, at % CHUNKS);
    };
#pragma unroll
    for (int base = 0; base < 2 * STEPS; base += BATCH) {
        uint2 eights[BATCH];
#pragma unroll
        for (int i = base; i < min(base + BATCH, 2 * STEPS); ++i)
            eights[i - base] = load_eight(fetched + (thread + i * THREADS) * 8);
#pragma unroll
        for (int i = base; i < min(base + BATCH, 2 * STEPS); ++i)
            store_widened(key_tile + i / STEPS * TILE_BYTES + place(i % STEPS), eights[i - base]);
    }
}
#endif

#if SCALES_QUERIES
__device__ __forceinline__ float scale_own_queries(u32 queries, const Chunk& chunk) {
    const int first = threadIdx.x / WARP_SIZE * WARP_ROWS;
    const float down = scale_queries<WARP_ROWS>(
        chunk.num_rows - chunk.first_row - first,
        [&](int row, int column) { return queries + SharedTile::offset(first + row, column); });
    __syncwarp();
    return down;
}
#endif

// Stores through shared memory, 16 bytes at a time.
__device__ __forceinline__ void store_rows(const WarpState& state, unsigned char* queries, T* out, const Chunk& chunk,
                                           int kv_head, int num_kv_heads, float value_scale) {
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    __syncwarp();
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float total = state.total[r][h];
            total += __shfl_xor_sync(FULL_WARP, total, 1);
            total += __shfl_xor_sync(FULL_WARP, total, 2);
            const float scale = reciprocal_or_zero(total) * value_scale;
            const int row = warp * WARP_ROWS + r * 16 + h * 8 + lane / 4;
#pragma unroll
            for (int n = 0; n < 2 * STEPS; ++n) {
                const u32 pair = pack_pair(state.sum[r][n][2 * h] * scale, state.sum[r][n][2 * h + 1] * scale);
                *reinterpret_cast<u32*>(queries + SharedTile::offset(row, n) + lane % 4 * 4) = pair;
            }
        }
    }
    __syncwarp();
#pragma unroll 4
    for (int i = lane; i < WARP_ROWS * SharedTile::CHUNKS; i += WARP_SIZE) {
        const int row = warp * WARP_ROWS + i / SharedTile::CHUNKS, column = i % SharedTile::CHUNKS;
        if (chunk.first_row + row >= chunk.num_rows) break;
        const T* from = reinterpret_cast<const T*>(queries + SharedTile::offset(row, column));
        store_vec(out + chunk.element(chunk.first_row + row, kv_head, num_kv_heads) + column * 8, load_vec(from));
    }
}

__device__ __forceinline__ void attend(T* out, const T* q, const PagedHead& head, const Chunk& chunk, int kv_head,
                                       int num_kv_heads, int context_len, float scale_log2, float value_scale,
                                       int window) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const Shared shared{memory};
    const int warp_row = threadIdx.x / WARP_SIZE * WARP_ROWS;
    const int first_position = chunk.position(chunk.first_row);
    const int first_key = max(0, first_position - window + 1);
    const int end_key = min(chunk.position(min(chunk.first_row + ROWS, chunk.num_rows) - 1) + 1, context_len);
    const int end_tile = ceil_div(end_key, KEYS);
    int tile = first_key / KEYS;

    copy_ids(shared.ids(0), head, tile);
    copy_ids(shared.ids(1), head, tile + 1);
    commit_copies();
    wait_for_copies<0>();
    __syncthreads();
    copy_queries(shared.queries(), q, chunk, kv_head, num_kv_heads);
    copy_tile(shared.fetched(0), shared.ids(0), head, tile, first_key, end_key);
    commit_copies();
    WarpState state = {};
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) state.maximum[r][0] = state.maximum[r][1] = minus_infinity();

#if SCALES_QUERIES
    wait_for_copies<0>();
    __syncwarp();
    scale_log2 *= scale_own_queries(shared.queries(), chunk);
#endif
    for (int stage = 0; tile < end_tile; ++tile, stage ^= 1) {
        wait_for_copies<0>();
        __syncthreads();  // the tile has landed; the other stage is free
        if (tile + 1 < end_tile) {
            copy_tile(shared.fetched(stage ^ 1), shared.ids(stage ^ 1), head, tile + 1, first_key, end_key);
            copy_ids(shared.ids(stage), head, tile + 2);
            commit_copies();
        }
#if QUIRE_KV_FP8
        widen_tile(shared.keys(stage), shared.fetched(stage));
        __syncthreads();
#endif
        float score[ROW_TILES][2 * KEY_STEPS][4] = {};
        score_tile(score, shared.queries() + warp_row * SharedTile::ROW_BYTES, shared.keys(stage));
        const bool all_visible = tile * KEYS + KEYS - 1 <= chunk.position(chunk.first_row + warp_row) &&
                              tile * KEYS > chunk.position(chunk.first_row + warp_row + WARP_ROWS - 1) - window;
        if (!all_visible) mask_tile(score, chunk, chunk.first_row + warp_row, tile * KEYS, window);
        weigh_tile(state, score, scale_log2);
        add_values(state, score, shared.keys(stage) + TILE_BYTES);
    }
    wait_for_copies<0>();
    store_rows(state, memory, out, chunk, kv_head, num_kv_heads, value_scale);
}

#endif

extern "C" __global__ void __launch_bounds__(THREADS)
paged_prefill(T* __restrict__ out, const T* __restrict__ q, const Kv* __restrict__ kv,
                        const int* __restrict__ block_tables, const int* __restrict__ context_lens,
                        const int* __restrict__ query_start, int num_blocks, int num_layers, int layer, int max_blocks,
                        float scale_log2, int window, const float* kv_scales) {
    const int kv_head = blockIdx.x, num_kv_heads = gridDim.x, sequence = blockIdx.y;
    const int start = query_start[sequence], num_tokens = query_start[sequence + 1] - start;
    const int first_row = (ceil_div(num_tokens * GROUP, ROWS) - 1 - static_cast<int>(blockIdx.z)) * ROWS;
    if (first_row < 0) return;
    const int context_len = context_lens[sequence];
    const Chunk chunk = {start, num_tokens * GROUP, context_len - num_tokens, first_row};
    const KvScales scales(kv_scales, layer, num_kv_heads);
    const PagedHead head(kv, block_tables + static_cast<i64>(sequence) * max_blocks, num_blocks, max_blocks, num_layers,
                         layer, num_kv_heads, kv_head);
    attend(out, q, head, chunk, kv_head, num_kv_heads, head.clamped(context_len),
           scale_log2 * scales.key(kv_head), scales.value(kv_head), window);
}
