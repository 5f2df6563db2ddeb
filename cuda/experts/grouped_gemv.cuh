// MoE grouped GEMV: the loop of linear/gemv.cuh over all experts' items; weights are prefetched across items.
#pragma once

#include "experts/expert_items.cuh"
#include "layer/gated.cuh"
#include "linear/gemv.cuh"

#if GATED && ROW_TILES != 1
#error "a gated tile has eight rows of gates and eight of ups"
#endif

template <typename W, typename X>
struct ExpertGemv {
    using One = Gemv<W, X>;
    using Items = ExpertItems<MAX_ROWS, TILE_ROWS>;

    // A warp's spans of K in an item, then in the block's next item.
    struct Position {
        ExpertItem item;
        int k;

        __device__ __forceinline__ void advance(const Items& items, int warp, int k_size) {
            k += WARPS * SPAN;
            if (k - warp * SPAN < k_size) return;
            k = warp * SPAN;
            item = items.at(item.index + gridDim.x);
        }
    };

    static __device__ __forceinline__ void start_copies(u32 stage, const W* weight, const Position& at, int n_size,
                                                        int k_size) {
        const W* of_expert = weight + static_cast<i64>(at.item.expert) * n_size * k_size;
#if GATED
        const int lane = threadIdx.x % WARP_SIZE, first = lane / One::VECS, vec = lane % One::VECS;
        const int k = at.k + vec * One::SIZE;
#pragma unroll
        for (int n = 0; n < One::COPIES; n++) {
            const int row = first + n * (WARP_SIZE / One::VECS), own = at.item.tile_row / 2 + row % 8;
            const bool wanted = k < k_size && own < n_size / 2 && at.item.tile_row < n_size;
            const W* from = of_expert + static_cast<i64>(row < 8 ? own : n_size / 2 + own) * k_size + k;
            copy_async_16(stage + One::shared_offset(row, vec), wanted ? from : weight, wanted);
        }
        commit_copies();
#else
        One::start_copies(stage, of_expert, typename One::Position{at.item.tile_row, at.k}, n_size, k_size);
#endif
    }

    // Like Gemv::run, but a product has begin_item, and its finish gets the row of x.
    template <typename Product>
    static __device__ __forceinline__ void run(const X* x, const int* rows, const W* weight, const int* offsets, Out* out,
                                               int num_experts, int n_size, int k_size, Product product) {
        extern __shared__ __align__(128) char shared[];
        float* partials = reinterpret_cast<float*>(shared + One::RING_BYTES);
        const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
        const int g = lane / 4, t = lane % 4;
        const char* ring = shared + warp * STAGES * One::STAGE_BYTES;
        const u32 ring_address = shared_address(ring);

        if (!GATED) start_next_kernel();
        if (!KNOWN) wait_for_previous_kernel();  // which may write `offsets`
        if (GATED) start_next_kernel();  // which may read `offsets` before its wait
        const Items items(offsets, reinterpret_cast<int*>(partials + 2 * PARTIAL_FLOATS), num_experts, n_size);
        Position ahead = {items.at(blockIdx.x), warp * SPAN};
        Position at = ahead;
#pragma unroll
        for (int stage = 0; stage < STAGES - 1; stage++) {
            start_copies(ring_address + stage * One::STAGE_BYTES, weight, ahead, n_size, k_size);
            ahead.advance(items, warp, k_size);
        }
        if (KNOWN) wait_for_previous_kernel();

        const X* x_rows[COL_TILES];
        GemvSums sum = {};
        int stage = 0, parity = 0, begun = -1;
        while (at.item.tile_row < n_size) {
            if (at.item.index != begun) {
                begun = at.item.index;
                product.begin_item(at.item.expert, n_size);
                // Columns past the last pair repeat it and are not written.
#pragma unroll
                for (int j = 0; j < COL_TILES; j++) {
                    const int pair = at.item.first_pair + min(j * MMA_COLS + g, at.item.num_pairs - 1);
                    x_rows[j] = x + static_cast<i64>(rows == nullptr ? pair : rows[pair]) * k_size + t * One::SIZE;
                }
            }
            uint4 by[One::CHUNKS][COL_TILES][One::X_VECS];
#pragma unroll
            for (int c = 0; c < One::CHUNKS; c++) {
                const int k = at.k + c * One::CHUNK;
#pragma unroll
                for (int j = 0; j < COL_TILES; j++) {
#pragma unroll
                    for (int v = 0; v < One::X_VECS; v++)
                        by[c][j][v] =
                            k + t * One::SIZE < k_size ? reinterpret_cast<const uint4*>(x_rows[j] + k)[v] : uint4{};
                }
            }
            product.begin_span(at.item.tile_row, at.k);
            wait_for_copies<STAGES - 2>();
            __syncwarp();  // the stage has landed, the previous one is free
            start_copies(ring_address + (stage + STAGES - 1) % STAGES * One::STAGE_BYTES, weight, ahead, n_size, k_size);
            ahead.advance(items, warp, k_size);
            const char* held = ring + stage * One::STAGE_BYTES;
#pragma unroll
            for (int c = 0; c < One::CHUNKS; c++) {
                typename Product::Operand columns[COL_TILES];
#pragma unroll
                for (int j = 0; j < COL_TILES; j++) product.widen_x(columns[j], by[c][j]);
#pragma unroll
                for (int i = 0; i < ROW_TILES; i++) {
                    typename Product::Operand low, high;
                    product.widen(low, load_shared(held + One::shared_offset(i * 16 + g, c * 4 + t)));
                    product.widen(high, load_shared(held + One::shared_offset(i * 16 + g + 8, c * 4 + t)));
#pragma unroll
                    for (int j = 0; j < COL_TILES; j++) product.multiply(sum, i, j, low, high, columns[j]);
                }
            }
            product.end_span(sum);
            stage = (stage + 1) % STAGES;
            const ExpertItem item = at.item;
            at.advance(items, warp, k_size);
            if (at.item.index == item.index) continue;

            float* partial = partials + parity * PARTIAL_FLOATS;
            parity ^= 1;  // double-buffered: the next item's sums need no barrier
#pragma unroll
            for (int i = 0; i < ROW_TILES; i++) {
#pragma unroll
                for (int c = 0; c < 4 * COL_TILES; c++) {
                    const int m = c / 4 * MMA_COLS + 2 * t + c % 2, row = i * 16 + g + 8 * (c % 4 / 2);
                    partial[(warp * MAX_ROWS + m) * TILE_ROWS + row] = sum[i][c / 4][c % 4];
                    sum[i][c / 4][c % 4] = 0.0f;
                }
            }
            __syncthreads();
#if GATED
            for (int task = threadIdx.x; task < item.num_pairs * 8; task += blockDim.x) {
                const int m = task / 8, n = item.tile_row / 2 + task % 8;
                if (n >= n_size / 2) continue;
                float gate = 0.0f, up = 0.0f;
#pragma unroll
                for (int w = 0; w < WARPS; w++) {
                    const float* of_warp = partial + (w * MAX_ROWS + m) * TILE_ROWS + task % 8;
                    gate += of_warp[0];
                    up += of_warp[8];
                }
                const int pair = item.first_pair + m, row = rows == nullptr ? pair : rows[pair];
                gate = product.finish(gate, row, n);
                up = product.finish(up, row, n_size / 2 + n);
                out[static_cast<i64>(pair) * (n_size / 2) + n] = gated(from_float<T>(gate), from_float<T>(up));
            }
#else
            for (int task = threadIdx.x; task < item.num_pairs * TILE_ROWS; task += blockDim.x) {
                const int pair = item.first_pair + task / TILE_ROWS, n = item.tile_row + task % TILE_ROWS;
                if (n >= n_size) continue;
                float total = 0.0f;
#pragma unroll
                for (int w = 0; w < WARPS; w++) total += partial[w * MAX_ROWS * TILE_ROWS + task];
                const int row = rows == nullptr ? pair : rows[pair];
                out[static_cast<i64>(pair) * n_size + n] = from_float<Out>(product.finish(total, row, n));
            }
#endif
        }
    }
};
