// gemv_w4a16: gemv with 4-bit weights, for up to X_ROWS rows.
//
//   tiles, scale, zero (or null): int4.cuh; group_spans: spans per group (1 with GROUPS > 1); arrays 16-byte aligned
//   Build macros: WARPS, ROW_TILES (of 16 weight rows), X_ROWS (1, 4, 8, 16), STAGES (spans in a warp's ring),
//   BLOCKS_PER_SM (limits registers), those of int4.cuh
//   GATED: N = 2 I, I a multiple of 16, ROW_TILES even; out is silu_mul's T [M, I]
//   NORMED: X_ROWS 1, K up to 8 blockDim.x; residual [K] += x, rounded to T; its rms_norm by norm [K] replaces x. Else
//   residual and norm are unused
//   FILL: a stage is refilled once read, not when the next is
//   grid (up to ceil(N / (16 ROW_TILES))), block (32 WARPS), shared memory: rings, two sets of sums, x
//   reference: NumpyOps.linear, NumpyOps.add_norm_linear, with the bits of the separate kernels
//   roofline: N K / 2 bytes and the scales; 0.85 of copy bandwidth at one row
//
// Weights are not rounded: for each group, x times (OFFSET + q) is summed in float, minus (OFFSET + zero point) times
// the sum of x (an mma with ones), then scaled. Warps split K; their sums are added in warp order.
#include "common/int4.cuh"
#include "common/product_types.cuh"
#include "layer/gated.cuh"

#ifndef GATED
#define GATED 0
#endif
#ifndef NORMED
#define NORMED 0
#endif
#if NORMED
#include "linear/normed_row.cuh"
#endif
#ifndef FILL
#define FILL 0
#endif

constexpr int COL_TILES = (X_ROWS + 7) / 8;
constexpr int TILE_ROWS = BLOCK_ROWS * ROW_TILES;
constexpr int PARTIAL_FLOATS = WARPS * X_ROWS * TILE_ROWS;
constexpr int PARTS = 1 + GATED;  // a tile has gate rows, then as many up rows
constexpr int PART_TILES = ROW_TILES / PARTS;
static_assert(ROW_TILES % PARTS == 0, "as many rows of up as of gate");
static_assert(!NORMED || X_ROWS == 1, "a block norms one row");
constexpr u32 ONES = QUIRE_DTYPE == 1 ? 0x3c003c00u : 0x3f803f80u;

constexpr int WEIGHT_BYTES = ROW_TILES * SPAN_BYTES;
constexpr int SCALES_BYTES = GROUPS * ROW_TILES * SCALE_BYTES;
constexpr int STAGE_BYTES = WEIGHT_BYTES + SCALES_BYTES + GROUPS * ROW_TILES * ZERO_BYTES;
constexpr int AHEAD = STAGES - 1 + FILL;  // stages in flight
constexpr int RING_BYTES = WARPS * STAGES * STAGE_BYTES;
constexpr int PIECES = GROUPS * ROW_TILES * 2;  // 16-byte pieces of a stage's scales, one per lane
static_assert(PIECES <= WARP_SIZE, "a lane copies a piece");

// Copies a warp's spans, tile after tile, into its ring. Integer units are as busy as memory: addresses are computed
// once per tile. Register loads would share a scoreboard: a wait for one waits for all.
struct Loader {
    const u8* tiles;
    const u8* scale;
    const u8* zero;
    int num_blocks, num_spans, group_spans;  // 16-row blocks; spans along K
    const u8* weights_from;                  // this lane's in the next span
    const u8* scales_from;
    const u8* zeros_from;
    int tile, span;
    u64 policy;  // L2 evict-first, used for one row

    __device__ __forceinline__ void copy_weights(u32 to, const u8* from) const {
        if (X_ROWS == 1)
            copy_async_16(to, from, policy);
        else
            copy_async_16(to, from, true);
    }

    // A partial last tile begins earlier.
    __device__ __forceinline__ int first_block(int at) const {
        return min(at * PART_TILES, num_blocks / PARTS - PART_TILES);
    }

    __device__ __forceinline__ i64 piece() const {
        const int lane = threadIdx.x % WARP_SIZE;
        int group = span * GROUPS + lane / 2 / ROW_TILES;
        if (GROUPS == 1 && group_spans > 1) group = span / group_spans;
        const int block = lane / 2 % ROW_TILES;
        return static_cast<i64>(group) * num_blocks + first_block(tile) + block % PART_TILES +
               block / PART_TILES * (num_blocks / PARTS);
    }
    __device__ __forceinline__ void begin_tile() {
        const int lane = threadIdx.x % WARP_SIZE;
        span = threadIdx.x / WARP_SIZE;
        weights_from = tiles + static_cast<i64>(span * num_blocks + first_block(tile)) * SPAN_BYTES + lane * 16;
        scales_from = scale + piece() * SCALE_BYTES + lane % 2 * 16;
        if (ZEROS) zeros_from = zero + piece() * ZERO_BYTES;
    }
    __device__ __forceinline__ void load(u32 stage) {
        const int lane = threadIdx.x % WARP_SIZE;
        if (tile * PART_TILES < num_blocks / PARTS) {
            if (span < num_spans) {
#pragma unroll
                for (int i = 0; i < 2 * ROW_TILES; i++) {
                    const u8* from = weights_from + i % (2 * PART_TILES) * TILE_BYTES;
                    if (i >= 2 * PART_TILES) from += static_cast<i64>(num_blocks / PARTS) * SPAN_BYTES;
                    copy_weights(stage + lane * 16 + i * TILE_BYTES, from);
                }
                if (lane < PIECES) {
                    copy_async_16(stage + WEIGHT_BYTES + lane * 16, scales_from, true);
                    if (ZEROS && lane % 2 == 0)
                        copy_async_16(stage + WEIGHT_BYTES + SCALES_BYTES + lane * 8, zeros_from, true);
                }
            }
            span += WARPS;
            if (span < num_spans) {
                weights_from += static_cast<i64>(WARPS) * SPAN_BYTES * num_blocks;
                if (GROUPS > 1 || group_spans == 1) {
                    scales_from += static_cast<i64>(WARPS) * GROUPS * SCALE_BYTES * num_blocks;
                    if (ZEROS) zeros_from += static_cast<i64>(WARPS) * GROUPS * ZERO_BYTES * num_blocks;
                } else {
                    scales_from = scale + piece() * SCALE_BYTES + lane % 2 * 16;
                    if (ZEROS) zeros_from = zero + piece() * ZERO_BYTES;
                }
            } else {
                tile += gridDim.x;
                begin_tile();
            }
        }
        commit_copies();
    }
};

// Rows of x; 16-byte chunks are XORed with the row: no bank conflicts in ldmatrix.
struct SharedX {
    char* base;
    int row_bytes;

    __device__ __forceinline__ void fill(const T* x, int num_rows) const {
        constexpr int HELD = 4, THREADS = 32 * WARPS;
        const int chunks = row_bytes / 16, all = num_rows * chunks;
        const uint4* from = reinterpret_cast<const uint4*>(x);
        for (int first = threadIdx.x; first < all; first += HELD * THREADS) {
            uint4 held[HELD];
#pragma unroll
            for (int i = 0; i < HELD; i++)
                if (first + i * THREADS < all) held[i] = from[first + i * THREADS];
#pragma unroll
            for (int i = 0; i < HELD; i++) {
                const int at = first + i * THREADS, m = X_ROWS == 1 ? 0 : at / chunks, chunk = at - m * chunks;
                if (at < all) *reinterpret_cast<uint4*>(base + m * row_bytes + (chunk ^ (m % 8)) * 16) = held[i];
            }
        }
    }

    // This lane's row among 8 j .. 8 j + 7.
    __device__ __forceinline__ u32 row_address(int j) const {
        return shared_address(base) + min(8 * j + static_cast<int>(threadIdx.x) % 8, X_ROWS - 1) * row_bytes;
    }
    // Fragments of 64 columns.
    static __device__ __forceinline__ void load(u32 (&columns)[4][2], u32 at, int j) {
        const int lane = threadIdx.x % WARP_SIZE, row = min(8 * j + lane % 8, X_ROWS - 1);
#pragma unroll
        for (int n = 0; n < 2; n++) {
            u32 matrices[4];
            load_matrices(matrices, at + (((4 * n + lane / 8) ^ (row % 8)) * 16));
#pragma unroll
            for (int i = 0; i < 4; i++) columns[2 * n + i / 2][i % 2] = matrices[i];
        }
    }
};

using Sums = float[ROW_TILES][COL_TILES][4];

__device__ __forceinline__ void clear(Sums& sum) {
#pragma unroll
    for (int n = 0; n < ROW_TILES * COL_TILES * 4; n++) sum[n / 4 / COL_TILES][n / 4 % COL_TILES][n % 4] = 0.0f;
}

__device__ __forceinline__ void add_span(Sums& sum, const char* stage, const u32 (&x_at)[COL_TILES], int span) {
    const int lane = threadIdx.x % WARP_SIZE;
    constexpr int HALF_GROUPS = GROUPS == 4 ? 2 : 1;  // per half span
    const u32 ones[4] = {ONES, ONES, ONES, ONES};
    Sums of_group;
    float x_sum[COL_TILES][HALF_GROUPS][4];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u32 columns[COL_TILES][4][2];
#pragma unroll
        for (int j = 0; j < COL_TILES; j++) {
            SharedX::load(columns[j], x_at[j] + span * (SPAN * 2) + half * 128, j);
#pragma unroll
            for (int s = 0; s < 4; s++) {
                if ((half * 4 + s) % GROUP_STEPS == 0) {
#pragma unroll
                    for (int c = 0; c < 4; c++) x_sum[j][s / GROUP_STEPS][c] = 0.0f;
                }
                mma_16x8x16(x_sum[j][s / GROUP_STEPS], ones, columns[j][s][0], columns[j][s][1]);
            }
        }
#pragma unroll
        for (int i = 0; i < ROW_TILES; i++) {
            const uint4 four =
                *reinterpret_cast<const uint4*>(stage + i * SPAN_BYTES + half * TILE_BYTES + lane * 16);
            const u32 words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int s = 0; s < 4; s++) {
                const int step = half * 4 + s;
                const u32 a[4] = {raised<0>(words[s]), raised<1>(words[s]), raised<2>(words[s]), raised<3>(words[s])};
#pragma unroll
                for (int j = 0; j < COL_TILES; j++) {
                    if (step % GROUP_STEPS == 0) {
#pragma unroll
                        for (int c = 0; c < 4; c++) of_group[i][j][c] = 0.0f;
                    }
                    mma_16x8x16(of_group[i][j], a, columns[j][s][0], columns[j][s][1]);
                }
                if (step % GROUP_STEPS != GROUP_STEPS - 1) continue;
                const char* parameters = stage + WEIGHT_BYTES;
                const int block = step / GROUP_STEPS * ROW_TILES + i;
                const float2 scales =
                    widen_scales(*reinterpret_cast<const u32*>(parameters + block * SCALE_BYTES + lane / 4 * 4));
                float near = OFFSET + DEFAULT_ZERO, far = near;
                if (ZEROS) {
                    const u32 both = *reinterpret_cast<const u16*>(parameters + SCALES_BYTES + block * ZERO_BYTES +
                                                                   lane / 4 * 2);
                    near = OFFSET + (both & 0xffu);
                    far = OFFSET + (both >> 8);
                }
#pragma unroll
                for (int n = 0; n < COL_TILES * 4; n++) {
                    const int j = n / 4, c = n % 4;
                    const float less = fmaf(c < 2 ? -near : -far, x_sum[j][s / GROUP_STEPS][c], of_group[i][j][c]);
                    sum[i][j][c] = fmaf(less, c < 2 ? scales.x : scales.y, sum[i][j][c]);
                }
            }
        }
    }
}

// Adds and stores the warps' sums of a tile; clears them.
__device__ __forceinline__ void store_tile(Sums& sum, float* partial, int first_row, const T* bias, Out* out,
                                           int num_rows, int n_size) {
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++) {
#pragma unroll
        for (int c = 0; c < 4 * COL_TILES; c++) {
            const int m = c / 4 * 8 + 2 * t + c % 2, row = i * BLOCK_ROWS + g + 8 * (c % 4 / 2);
            if (m < num_rows) partial[(warp * X_ROWS + m) * TILE_ROWS + row] = sum[i][c / 4][c % 4];
        }
    }
    clear(sum);
    __syncthreads();
    const auto total_of = [&](int m, int row, int n) {
        float total = bias == nullptr ? 0.0f : to_float(bias[n]);
#pragma unroll
        for (int w = 0; w < WARPS; w++) total += partial[(w * X_ROWS + m) * TILE_ROWS + row];
        return total;
    };
    constexpr int PART_ROWS = TILE_ROWS / PARTS;
    for (int task = threadIdx.x; task < num_rows * PART_ROWS; task += blockDim.x) {
        const int m = task / PART_ROWS, row = task % PART_ROWS, n = first_row + row, width = n_size / PARTS;
        const float total = total_of(m, row, n);
#if GATED
        const T gate = from_float<T>(total), up = from_float<T>(total_of(m, PART_ROWS + row, width + n));
        out[static_cast<i64>(m) * width + n] = gated(gate, up);
#else
        out[static_cast<i64>(m) * width + n] = from_float<Out>(total);
#endif
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS_PER_SM)
    gemv_w4a16(const T* x, T* residual, const T* norm, float eps, const u8* tiles, const u16* scale, const u8* zero,
               const T* bias, Out* out, int num_rows, int n_size, int k_size, int group_spans) {
    extern __shared__ __align__(128) char shared[];
    float* partials = reinterpret_cast<float*>(shared + RING_BYTES);
    const SharedX shared_x = {shared + RING_BYTES + 2 * PARTIAL_FLOATS * sizeof(float), k_size * 2};
    const int warp = threadIdx.x / WARP_SIZE, num_spans = k_size / SPAN;
    Loader loader = {tiles, reinterpret_cast<const u8*>(scale), zero, n_size / BLOCK_ROWS, num_spans, group_spans};
    const char* ring = shared + warp * STAGES * STAGE_BYTES;
    const u32 ring_address = shared_address(ring);
    loader.policy = policy_of_read_once();

    start_next_kernel();
    loader.tile = blockIdx.x;
    loader.begin_tile();
    loader.load(ring_address);  // more copies would slow the previous kernel
#if NORMED
    NormedRow row{x, residual, norm, eps};
    row.get(reinterpret_cast<float*>(shared_x.base), k_size);
#else
    wait_for_previous_kernel();
    shared_x.fill(x, num_rows);
    __syncthreads();
#endif
#pragma unroll
    for (int stage = 1; stage < AHEAD; stage++) loader.load(ring_address + stage * STAGE_BYTES);

    u32 x_at[COL_TILES];
#pragma unroll
    for (int j = 0; j < COL_TILES; j++) x_at[j] = shared_x.row_address(j);
    Sums sum;
    clear(sum);
    int stage = 0, next = STAGES - 1, parity = 0;
    for (int tile = blockIdx.x; tile * (TILE_ROWS / PARTS) < n_size / PARTS; tile += gridDim.x) {
        int span = warp;
        do {  // once even without a span
            wait_for_copies<AHEAD - 1>();
            __syncwarp();  // the stage has landed, the previous one is free
            if (!FILL) loader.load(ring_address + next * STAGE_BYTES);
            if (span < num_spans) add_span(sum, ring + stage * STAGE_BYTES, x_at, span);
            if (FILL) {
                __syncwarp();  // all lanes have read the stage
                loader.load(ring_address + stage * STAGE_BYTES);
            }
            next = stage;
            stage = stage == STAGES - 1 ? 0 : stage + 1;
            span += WARPS;
        } while (span < num_spans);
        store_tile(sum, partials + parity * PARTIAL_FLOATS, loader.first_block(tile) * BLOCK_ROWS, bias, out, num_rows,
                   n_size);
        parity ^= 1;
    }
#if NORMED
    row.finish(k_size);
#endif
}
