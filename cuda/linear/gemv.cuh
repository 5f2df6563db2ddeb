// GEMV main loop: persistent blocks whose warps split K and stream weights through shared-memory rings.
//
// Build macros: WARPS, ROW_TILES (of 16 weight rows), COL_TILES (of 8 rows of x), SPAN (of K per warp turn), STEP (of K
// per stage, default SPAN), STAGES (of a warp's ring), X_AHEAD (read x a step ahead, default 0), STREAMED (evict
// weights from L2 first, default 0), GATED_ROWS (N = 2 I, a multiple of the tiles; a tile has gate rows, then up rows;
// out is silu_mul's T [M, I]; default 0). Sums are added in warp order: a row's bits depend only on K, WARPS and SPAN.
#pragma once

#include "common/mma.cuh"
#include "common/product_types.cuh"

#ifndef STEP
#define STEP SPAN
#endif
#ifndef X_AHEAD
#define X_AHEAD 0
#endif
#ifndef FILL
#define FILL 0
#endif
#ifndef STREAMED
#define STREAMED 0
#endif
#ifndef GATED_ROWS
#define GATED_ROWS 0
#endif

constexpr int MMA_COLS = 8;  // rows of x
constexpr int MAX_ROWS = MMA_COLS * COL_TILES;
constexpr int TILE_ROWS = 16 * ROW_TILES;
#ifndef KEPT_ROWS
#define KEPT_ROWS MAX_ROWS
#endif
constexpr int PARTIAL_FLOATS = WARPS * KEPT_ROWS * TILE_ROWS;

// x in global memory.
template <typename X>
struct GivenRows {
    const X* x;

    static __device__ __forceinline__ int stride(int width) { return width; }
    __device__ __forceinline__ const X* get(float*, int) const {
        wait_for_previous_kernel();
        return x;
    }
    __device__ __forceinline__ void announce() const {}
    __device__ __forceinline__ void finish_early(int) const {}
};

// Row stride in shared memory; lanes that read two rows use different banks.
__device__ __forceinline__ int shared_stride(int width) { return (width + 63) / 64 * 64 + 32; }

// Up to KEPT_ROWS rows, copied to shared memory once for all tiles.
template <typename X>
struct SharedRows {
    const X* x;
    int num_rows;

    static __device__ __forceinline__ int stride(int width) { return shared_stride(width); }
    __device__ __forceinline__ const X* get(float* shared, int width) {
        X* rows = reinterpret_cast<X*>(shared);
        wait_for_previous_kernel();
        for (int i = threadIdx.x * Vec<X>::SIZE; i < width; i += blockDim.x * Vec<X>::SIZE) {
            Vec<X> held[KEPT_ROWS];
#pragma unroll
            for (int m = 0; m < KEPT_ROWS; m++)
                if (m < num_rows) held[m] = load_vec(x + static_cast<i64>(m) * width + i);
#pragma unroll
            for (int m = 0; m < KEPT_ROWS; m++)
                if (m < num_rows) store_vec(rows + m * stride(width) + i, held[m]);
        }
        __syncthreads();
        return rows;
    }
    __device__ __forceinline__ void announce() const {}
    __device__ __forceinline__ void finish_early(int) const {}
};

using GemvSums = float[ROW_TILES][COL_TILES][4];

// Weights of type W, rows of x of type X.
template <typename W, typename X>
struct Gemv {
    static constexpr int SIZE = 16 / sizeof(W);
    static constexpr int VECS = STEP / SIZE;  // per weight row of a stage
    static constexpr int CHUNK = 4 * SIZE;  // one vector for each of a row's four lanes
    static constexpr int CHUNKS = STEP / CHUNK;
    static constexpr int X_VECS = SIZE * sizeof(X) / 16;  // of x per vector of weights
    static constexpr int STAGE_BYTES = TILE_ROWS * STEP * sizeof(W);
    static constexpr int COPIES = TILE_ROWS * VECS / WARP_SIZE;
    static constexpr int RING_BYTES = WARPS * STAGES * STAGE_BYTES;
    static_assert(SPAN % STEP == 0, "steps fill a span");
    static_assert(VECS % 8 == 0 && WARP_SIZE % VECS == 0, "a row of a stage fills whole lines of 128 bytes");

    struct Position {
        int tile;  // first weight row
        int k;     // first element of K

        __device__ __forceinline__ void advance(int warp, int k_size) {
            const bool ends_span = STEP == SPAN || (k + STEP) % SPAN == 0;
            k += ends_span ? (WARPS - 1) * SPAN + STEP : STEP;
            if (ends_span && k - warp * SPAN >= k_size) {
                k = warp * SPAN;
                tile += gridDim.x * TILE_ROWS;
            }
        }
    };

    using XVecs = uint4[CHUNKS][COL_TILES][X_VECS];  // of a lane, per step

    static __device__ __forceinline__ int shared_offset(int row, int vec) { return row_pair_offset<VECS>(row, vec); }

    static __device__ __forceinline__ void start_copies(u32 stage, const W* weight, Position at, int n_size,
                                                        int k_size) {
        const int lane = threadIdx.x % WARP_SIZE;
        const int first = lane / VECS, vec = lane % VECS, k = at.k + vec * SIZE;
        const W* from = weight + static_cast<i64>((GATED_ROWS ? at.tile / 2 : at.tile) + first) * k_size + k;
#pragma unroll
        for (int n = 0; n < COPIES; n++) {
            const int row = first + n * (WARP_SIZE / VECS);
            if (GATED_ROWS && n == COPIES / 2) from += static_cast<i64>(n_size / 2 - TILE_ROWS / 2) * k_size;
            const bool wanted = k < k_size && at.tile + (GATED_ROWS ? 0 : row) < n_size;
            const u32 to = stage + shared_offset(row, vec);
            if (STREAMED) {
                copy_streamed_16(to, wanted ? from : weight, wanted);
            } else {
                copy_async_16(to, wanted ? from : weight, wanted);
            }
            from += static_cast<i64>(WARP_SIZE / VECS) * k_size;
        }
        commit_copies();
    }

    // `rows` waits for the previous kernel, returns x and may use shared memory after the sums; without FILL it
    // finishes at the first tile's barrier. `product` multiplies and finishes sums.
    template <typename Rows, typename Product>
    static __device__ __forceinline__ void run(Rows& rows, const W* weight, Out* out, int num_rows, int n_size,
                                               int k_size, Product product) {
        extern __shared__ __align__(128) char shared[];
        float* partials = reinterpret_cast<float*>(shared + RING_BYTES);
        const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
        const int g = lane / 4, t = lane % 4;
        const char* ring = shared + warp * STAGES * STAGE_BYTES;
        const u32 ring_address = shared_address(ring);

        start_next_kernel();
        Position ahead = {static_cast<int>(blockIdx.x) * TILE_ROWS, warp * SPAN};
        Position at = ahead;
#pragma unroll
        for (int stage = 0; stage < STAGES - 1 + FILL; stage++) {
            start_copies(ring_address + stage * STAGE_BYTES, weight, ahead, n_size, k_size);
            ahead.advance(warp, k_size);
        }
        const X* x = rows.get(partials + 2 * PARTIAL_FLOATS, k_size);

        // Columns past the last row repeat it and are not written.
        const X* x_rows[COL_TILES];
#pragma unroll
        for (int j = 0; j < COL_TILES; j++)
            x_rows[j] = x + static_cast<i64>(min(j * MMA_COLS + g, num_rows - 1)) * rows.stride(k_size) + t * SIZE;
        GemvSums sum = {};
        const auto load_x = [&](XVecs& to, int first) {
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) {
                const int k = first + c * CHUNK;
#pragma unroll
                for (int j = 0; j < COL_TILES; j++) {
#pragma unroll
                    for (int v = 0; v < X_VECS; v++)
                        to[c][j][v] =
                            k + t * SIZE < k_size ? reinterpret_cast<const uint4*>(x_rows[j] + k)[v] : uint4{};
                }
            }
        };
#if X_AHEAD
        XVecs next_by;
        load_x(next_by, at.k);
#endif
        int stage = 0, parity = 0;
        while (at.tile < n_size) {
            XVecs by;
#if X_AHEAD
            memcpy(by, next_by, sizeof(XVecs));
#else
            load_x(by, at.k);
#endif
            if (STEP == SPAN || at.k % SPAN == 0) product.begin_span(at.tile, at.k);
            wait_for_copies<STAGES - 2 + FILL>();
            __syncwarp();  // the stage has landed, the previous one is free
            if (!FILL) {
                start_copies(ring_address + (stage + STAGES - 1) % STAGES * STAGE_BYTES, weight, ahead, n_size, k_size);
                ahead.advance(warp, k_size);
            }
#if X_AHEAD
            Position next = at;
            next.advance(warp, k_size);
            load_x(next_by, next.k);
#endif
            const char* held = ring + stage * STAGE_BYTES;
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) {
                typename Product::Operand columns[COL_TILES];
#pragma unroll
                for (int j = 0; j < COL_TILES; j++) product.widen_x(columns[j], by[c][j]);
#pragma unroll
                for (int i = 0; i < ROW_TILES; i++) {
                    typename Product::Operand low, high;
                    product.widen(low, load_shared(held + shared_offset(i * 16 + g, c * 4 + t)));
                    product.widen(high, load_shared(held + shared_offset(i * 16 + g + 8, c * 4 + t)));
#pragma unroll
                    for (int j = 0; j < COL_TILES; j++) product.multiply(sum, i, j, low, high, columns[j]);
                }
            }
            if (STEP == SPAN || at.k % SPAN == SPAN - STEP) product.end_span(sum);
            if (FILL) {
                __syncwarp();  // all lanes have read the stage
                start_copies(ring_address + stage * STAGE_BYTES, weight, ahead, n_size, k_size);
                ahead.advance(warp, k_size);
            }
            stage = (stage + 1) % STAGES;
            const int tile = at.tile;
            at.advance(warp, k_size);
            if (at.tile == tile) continue;

            float* partial = partials + parity * PARTIAL_FLOATS;
            parity ^= 1;  // double-buffered: saves a barrier
#pragma unroll
            for (int i = 0; i < ROW_TILES; i++) {
#pragma unroll
                for (int c = 0; c < 4 * COL_TILES; c++) {
                    const int m = c / 4 * MMA_COLS + 2 * t + c % 2, row = i * 16 + g + 8 * (c % 4 / 2);
                    if (m < KEPT_ROWS) partial[(warp * KEPT_ROWS + m) * TILE_ROWS + row] = sum[i][c / 4][c % 4];
                    sum[i][c / 4][c % 4] = 0.0f;
                }
            }
            const bool finishes_row = !FILL && tile == static_cast<int>(blockIdx.x) * TILE_ROWS;
            if (finishes_row) rows.announce();
            __syncthreads();
            if (finishes_row) rows.finish_early(k_size);
#if GATED_ROWS
            constexpr int HALF = TILE_ROWS / 2;
            for (int task = threadIdx.x; task < num_rows * HALF; task += blockDim.x) {
                const int m = task / HALF, row = task % HALF, n = tile / 2 + row;
                const float* from = partial + m * TILE_ROWS + row;
                float gate = 0.0f, up = 0.0f;
#pragma unroll
                for (int w = 0; w < WARPS; w++) {
                    gate += from[w * KEPT_ROWS * TILE_ROWS];
                    up += from[w * KEPT_ROWS * TILE_ROWS + HALF];
                }
                out[static_cast<i64>(m) * (n_size / 2) + n] = gated(from_float<T>(gate), from_float<T>(up));
            }
#else
            for (int task = threadIdx.x; task < num_rows * TILE_ROWS; task += blockDim.x) {
                const int m = task / TILE_ROWS, n = tile + task % TILE_ROWS;
                if (n >= n_size) continue;
                float total = product.start(n);
#pragma unroll
                for (int w = 0; w < WARPS; w++) total += partial[w * KEPT_ROWS * TILE_ROWS + task];
                out[static_cast<i64>(m) * n_size + n] = from_float<Out>(product.finish(total, m, n));
            }
#endif
        }
    }
};
