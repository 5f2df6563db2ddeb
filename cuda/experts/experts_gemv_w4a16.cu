// experts_gemv_w4a16: experts_gemv with 4-bit weights.
//
//   tiles, scale, zero (or null): int4.cuh, expert after expert; group_spans: as gemv_w4a16
//   Build macros: WARPS, ROW_TILES (of 16 weight rows), COL_TILES (of 8 pairs), STAGES (spans in a warp's ring), those
//   of int4.cuh
//   grid (up to P ceil(N / (16 ROW_TILES))), block (32 WARPS), shared memory: rings, two sets of sums, 4 E bytes
//   reference: NumpyOps.experts_linear
//   roofline: U N K / 2 bytes and the scales: Qwen3-30B-A3B, gate and up of 8 / 128 experts: 3 / 49 us on an H200; 0.7
//   of copy bandwidth expected
//
// Weights minus zero points are exact in 16 bits; group sums are scaled in float, warps' sums added in warp order.
#include "common/int4.cuh"
#include "common/product_types.cuh"
#include "experts/expert_items.cuh"

constexpr int MMA_COLS = 8;
constexpr int MAX_PAIRS = MMA_COLS * COL_TILES;
constexpr int TILE_ROWS = BLOCK_ROWS * ROW_TILES;
constexpr int PARTIAL_FLOATS = WARPS * MAX_PAIRS * TILE_ROWS;
constexpr int WEIGHT_BYTES = ROW_TILES * SPAN_BYTES;
constexpr int SCALES_BYTES = GROUPS * ROW_TILES * SCALE_BYTES;
constexpr int STAGE_BYTES = WEIGHT_BYTES + SCALES_BYTES + GROUPS * ROW_TILES * ZERO_BYTES;
constexpr int RING_BYTES = WARPS * STAGES * STAGE_BYTES;
constexpr int SCALE_PIECES = GROUPS * ROW_TILES * 2;  // of 16 bytes, per stage
constexpr int ZERO_PIECES = ZEROS ? GROUPS * ROW_TILES : 0;
static_assert(SCALE_PIECES <= WARP_SIZE && STAGE_BYTES % 16 == 0, "a lane copies a piece");

using Items = ExpertItems<MAX_PAIRS, TILE_ROWS>;
using Sums = float[ROW_TILES][COL_TILES][4];
using Columns = u32[COL_TILES][STEPS][2];  // B fragments of a span of x

struct Position {
    ExpertItem item;
    int span;

    __device__ __forceinline__ void advance(const Items& items, int warp, int num_spans) {
        span += WARPS;
        if (span - warp < num_spans) return;
        span = warp;
        item = items.at(item.index + gridDim.x);
    }
};

struct Weights {
    const u8* tiles;
    const u8* scale;
    const u8* zero;
    int num_blocks, num_spans, group_spans;  // 16-row blocks; spans along K

    __device__ __forceinline__ int num_groups() const {
        return GROUPS > 1 ? num_spans * GROUPS : num_spans / group_spans;
    }

    __device__ __forceinline__ void start_copies(u32 stage, const Position& at) const {
        const int lane = threadIdx.x % WARP_SIZE, first = at.item.tile_row / BLOCK_ROWS;
        if (first < num_blocks && at.span < num_spans) {
            const i64 expert_spans = static_cast<i64>(at.item.expert) * num_spans;
            const u8* from = tiles + ((expert_spans + at.span) * num_blocks + first) * SPAN_BYTES + lane * 16;
#pragma unroll
            for (int i = 0; i < 2 * ROW_TILES; i++)
                copy(stage + lane * 16 + i * TILE_BYTES, from + i * TILE_BYTES, tiles, first + i / 2 < num_blocks);
            if (lane < SCALE_PIECES) {
                const int block = first + lane / 2 % ROW_TILES;
                const u8* piece = scale + group_at(at, lane / 2 / ROW_TILES, block) * SCALE_BYTES + lane % 2 * 16;
                copy(stage + WEIGHT_BYTES + lane * 16, piece, scale, block < num_blocks);
            }
            if (lane < ZERO_PIECES) {
                const int block = first + lane % ROW_TILES;
                const u8* piece = zero + group_at(at, lane / ROW_TILES, block) * ZERO_BYTES;
                copy(stage + WEIGHT_BYTES + SCALES_BYTES + lane * 16, piece, zero, block < num_blocks);
            }
        }
        commit_copies();
    }

  private:
    // Index of 16 rows' parameters; `group` counts from the span's first.
    __device__ __forceinline__ i64 group_at(const Position& at, int group, int block) const {
        const int of_expert = GROUPS > 1 ? at.span * GROUPS + group : at.span / group_spans;
        return (static_cast<i64>(at.item.expert) * num_groups() + of_expert) * num_blocks + block;
    }

    static __device__ __forceinline__ void copy(u32 to, const u8* from, const u8* any, bool wanted) {
        copy_async_16(to, wanted ? from : any, wanted);
    }
};

__device__ __forceinline__ void add_span(Sums& sum, const char* stage, const Columns& columns) {
    const int lane = threadIdx.x % WARP_SIZE, g = lane / 4;
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++) {
        float of_group[COL_TILES][4];
        Zeros zeros;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint4 four = *reinterpret_cast<const uint4*>(stage + i * SPAN_BYTES + half * TILE_BYTES + lane * 16);
            const u32 words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int s = 0; s < 4; s++) {
                const int step = half * 4 + s, block = step / GROUP_STEPS * ROW_TILES + i;
                const char* parameters = stage + WEIGHT_BYTES;
                if (step % GROUP_STEPS == 0) {
                    const char* both = parameters + SCALES_BYTES + block * ZERO_BYTES + g * 2;
                    if (ZEROS) zeros = Zeros(*reinterpret_cast<const u16*>(both));
#pragma unroll
                    for (int n = 0; n < COL_TILES * 4; n++) of_group[n / 4][n % 4] = 0.0f;
                }
                u32 a[4];
                unpack(a, words[s], zeros);
#pragma unroll
                for (int j = 0; j < COL_TILES; j++) mma_16x8x16(of_group[j], a, columns[j][step][0], columns[j][step][1]);
                if (step % GROUP_STEPS != GROUP_STEPS - 1) continue;
                const float2 scales =
                    widen_scales(*reinterpret_cast<const u32*>(parameters + block * SCALE_BYTES + g * 4));
#pragma unroll
                for (int n = 0; n < COL_TILES * 4; n++) {
                    const int j = n / 4, c = n % 4;
                    sum[i][j][c] = fmaf(of_group[j][c], c < 2 ? scales.x : scales.y, sum[i][j][c]);
                }
            }
        }
    }
}

// Adds and stores the warps' sums of an item; clears them.
__device__ __forceinline__ void store_item(Sums& sum, float* partial, const ExpertItem& item, T* out, int n_size) {
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++) {
#pragma unroll
        for (int c = 0; c < 4 * COL_TILES; c++) {
            const int m = c / 4 * MMA_COLS + 2 * t + c % 2, row = i * BLOCK_ROWS + g + 8 * (c % 4 / 2);
            partial[(warp * MAX_PAIRS + m) * TILE_ROWS + row] = sum[i][c / 4][c % 4];
            sum[i][c / 4][c % 4] = 0.0f;
        }
    }
    __syncthreads();
    for (int task = threadIdx.x; task < item.num_pairs * TILE_ROWS; task += blockDim.x) {
        const int pair = item.first_pair + task / TILE_ROWS, n = item.tile_row + task % TILE_ROWS;
        if (n >= n_size) continue;
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) total += partial[w * MAX_PAIRS * TILE_ROWS + task];
        out[static_cast<i64>(pair) * n_size + n] = from_float<T>(total);
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    experts_gemv_w4a16(const T* x, const int* rows, const u8* tiles, const u16* scale, const u8* zero, const int* offsets,
                       T* out, int num_experts, int n_size, int k_size, int group_spans) {
    extern __shared__ __align__(128) char shared[];
    float* partials = reinterpret_cast<float*>(shared + RING_BYTES);
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE, g = lane / 4, t = lane % 4;
    const int num_spans = k_size / SPAN;
    const Weights weights = {tiles, reinterpret_cast<const u8*>(scale), zero, n_size / BLOCK_ROWS, num_spans, group_spans};
    const char* ring = shared + warp * STAGES * STAGE_BYTES;
    const u32 ring_address = shared_address(ring);

    start_next_kernel();
    wait_for_previous_kernel();  // which may write `offsets`
    const Items items(offsets, reinterpret_cast<int*>(partials + 2 * PARTIAL_FLOATS), num_experts, n_size);
    Position ahead = {items.at(blockIdx.x), warp};
    Position at = ahead;
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; stage++) {
        weights.start_copies(ring_address + stage * STAGE_BYTES, ahead);
        ahead.advance(items, warp, num_spans);
    }

    const T* x_rows[COL_TILES];
    Sums sum = {};
    int stage = 0, next = STAGES - 1, parity = 0, begun = -1;
    while (at.item.tile_row < n_size) {
        if (at.item.index != begun) {
            begun = at.item.index;
            // Columns past the last pair repeat it and are not written.
#pragma unroll
            for (int j = 0; j < COL_TILES; j++) {
                const int pair = at.item.first_pair + min(j * MMA_COLS + g, at.item.num_pairs - 1);
                x_rows[j] = x + static_cast<i64>(rows == nullptr ? pair : rows[pair]) * k_size + 2 * t;
            }
        }
        const bool has_span = at.span < num_spans;  // warps without a span take part too
        Columns columns;
        if (has_span) {
#pragma unroll
            for (int n = 0; n < COL_TILES * STEPS * 2; n++) {
                const int j = n / 2 / STEPS, step = n / 2 % STEPS, k = at.span * SPAN + step * 16 + n % 2 * 8;
                columns[j][step][n % 2] = *reinterpret_cast<const u32*>(x_rows[j] + k);
            }
        }
        wait_for_copies<STAGES - 2>();
        __syncwarp();  // the stage has landed, the previous one is free
        weights.start_copies(ring_address + next * STAGE_BYTES, ahead);
        ahead.advance(items, warp, num_spans);
        if (has_span) add_span(sum, ring + stage * STAGE_BYTES, columns);
        next = stage;
        stage = stage == STAGES - 1 ? 0 : stage + 1;
        const ExpertItem item = at.item;
        at.advance(items, warp, num_spans);
        if (at.item.index == item.index) continue;
        store_item(sum, partials + parity * PARTIAL_FLOATS, item, out, n_size);
        parity ^= 1;  // double-buffered: saves a barrier
    }
}
