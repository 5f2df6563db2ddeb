// gemv_w4a16: out[m] = x[m] @ weight.T + bias with 4-bit weights, for a few rows; bound by reading
// the weights once.
//
//   x [M, K]; tiles, scale and zero (or null) as in int4.cuh; bias [N] or null, out [M, N]; M <= X_ROWS; group_spans are
//   the spans of 128 columns in a group (1 with GROUPS > 1)
//   A build defines WARPS (a block), ROW_TILES (weight rows of a tile, in sixteens), X_ROWS (1, 4, 8 or 16), STAGES
//   (spans that a warp keeps in registers), BLOCKS_PER_SM, OUT_FLOAT: out has the build's type (0) or float32 (1), and
//   those of int4.cuh.
//   grid (up to N / (16 ROW_TILES), rounded up), block (32 WARPS), dynamic shared memory 8 WARPS X_ROWS 16 ROW_TILES
//   bytes and x: persistent blocks. The warps of a block split K, and their sums are added in the order of the warps:
//   results are deterministic. Weights are loaded straight into registers, since a lane reads no other's; the first
//   STAGES spans of a warp from before the previous kernel has ended.
//   reference: NumpyOps.linear
//   needs: all arrays aligned to 16 bytes, N a multiple of 16, K of 128
//   roofline: N K / 2 bytes and the scales moved; 0.85 of copy bandwidth at one row
//
// No weight is rounded: OFFSET + q is multiplied by x and summed in float for each group; (OFFSET + zero point) times the
// sum of x, which a product with ones gives, is taken off, and the rest is scaled in float.
#include "common/int4.cuh"

#if QUIRE_DTYPE == 0
#error "the tensor cores take float16 and bfloat16"
#endif
#if OUT_FLOAT
using Out = float;
#else
using Out = T;
#endif

constexpr int COL_TILES = (X_ROWS + 7) / 8;
constexpr int TILE_ROWS = BLOCK_ROWS * ROW_TILES;
constexpr int PARTIAL_FLOATS = WARPS * X_ROWS * TILE_ROWS;
constexpr u32 ONES = QUIRE_DTYPE == 1 ? 0x3c003c00u : 0x3f803f80u;

// A warp's position in the weights: its spans of K in one tile, then in the next.
struct Position {
    int tile, span;

    __device__ __forceinline__ void advance(int warp, int num_spans) {
        span += WARPS;
        if (span >= num_spans) {
            span = warp;
            tile += gridDim.x;
        }
    }
};

// A lane's weights of one span, with the scales and zero points of its rows.
struct Stage {
    uint4 words[ROW_TILES][2];
    u32 scales[ROW_TILES][GROUPS];
    u16 zeros[ROW_TILES][GROUPS];
};

__device__ __forceinline__ uint4 load_once(const u8* from) {
    uint4 four;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w)
                 : "l"(from));
    return four;
}

struct Weights {
    const u8* tiles;
    const u16* scale;
    const u8* zero;
    int num_blocks, num_spans, group_spans;  // sixteens of rows, then along K

    // Loads the weights at a position; past the end, those of the last sixteen rows.
    __device__ __forceinline__ void load(Stage& stage, Position at) const {
        const int lane = threadIdx.x % WARP_SIZE, first = at.tile * ROW_TILES;
        if (at.span >= num_spans || first >= num_blocks) return;
        int group = at.span * GROUPS;
        if (GROUPS == 1 && group_spans > 1) group = at.span / group_spans;
#pragma unroll
        for (int i = 0; i < ROW_TILES; i++) {
            const int block = ROW_TILES == 1 ? first : min(first + i, num_blocks - 1);
            const u8* from = tiles + static_cast<i64>(at.span * num_blocks + block) * SPAN_BYTES + lane * 16;
            stage.words[i][0] = load_once(from);
            stage.words[i][1] = load_once(from + TILE_BYTES);
#pragma unroll
            for (int n = 0; n < GROUPS; n++) {
                const i64 row = static_cast<i64>(group + n) * num_blocks + block;
                stage.scales[i][n] = __ldg(reinterpret_cast<const u32*>(scale) + row * 8 + lane / 4);
                if (ZEROS) stage.zeros[i][n] = __ldg(reinterpret_cast<const u16*>(zero) + row * 8 + lane / 4);
            }
        }
    }
};

// x in shared memory, rows one after another. The 16-byte chunks of each 128 bytes are XORed with the row, so that
// ldmatrix reads one chunk of eight rows without bank conflicts.
struct SharedX {
    char* base;
    int row_bytes;

    __device__ __forceinline__ void fill(const T* x, int num_rows) const {
        const int chunks = row_bytes / 16;
        for (int m = 0; m < num_rows; m++) {
            for (int chunk = threadIdx.x; chunk < chunks; chunk += blockDim.x) {
                const uint4 eight = reinterpret_cast<const uint4*>(x)[static_cast<i64>(m) * chunks + chunk];
                *reinterpret_cast<uint4*>(base + m * row_bytes + (chunk ^ (m % 8)) * 16) = eight;
            }
        }
    }

    // The fragments of 64 columns for rows 8 j to 8 j + 7.
    __device__ __forceinline__ void load(u32 (&columns)[4][2], int j, int span, int half) const {
        const int lane = threadIdx.x % WARP_SIZE, row = min(8 * j + lane % 8, X_ROWS - 1);
        const u32 at = shared_address(base) + row * row_bytes + span * (SPAN * 2) + half * 128;
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

// Adds the products of one span.
__device__ __forceinline__ void add_span(Sums& sum, const Stage& stage, const SharedX& x, int span) {
    constexpr int HALF_GROUPS = GROUPS == 4 ? 2 : 1;  // that a half of the span has, or has a part of
    const u32 ones[4] = {ONES, ONES, ONES, ONES};
    Sums of_group;
    float x_sum[COL_TILES][HALF_GROUPS][4];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u32 columns[COL_TILES][4][2];
#pragma unroll
        for (int j = 0; j < COL_TILES; j++) {
            x.load(columns[j], j, span, half);
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
            const uint4 four = stage.words[i][half];
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
                const float2 scales = widen_scales(stage.scales[i][step / GROUP_STEPS]);
                float near = OFFSET + DEFAULT_ZERO, far = near;
                if (ZEROS) {
                    const u32 both = stage.zeros[i][step / GROUP_STEPS];
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

// Adds the warps' sums of a tile, stores them, and clears them.
__device__ __forceinline__ void store_tile(Sums& sum, float* partial, int tile, const T* bias, Out* out, int num_rows,
                                           int n_size) {
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
    for (int task = threadIdx.x; task < num_rows * TILE_ROWS; task += blockDim.x) {
        const int m = task / TILE_ROWS, n = tile * TILE_ROWS + task % TILE_ROWS;
        if (n >= n_size) continue;
        float total = bias == nullptr ? 0.0f : to_float(bias[n]);
#pragma unroll
        for (int w = 0; w < WARPS; w++) total += partial[w * X_ROWS * TILE_ROWS + task];
        out[static_cast<i64>(m) * n_size + n] = from_float<Out>(total);
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS_PER_SM)
    gemv_w4a16(const T* x, const u8* tiles, const u16* scale, const u8* zero, const T* bias, Out* out, int num_rows,
               int n_size, int k_size, int group_spans) {
    extern __shared__ __align__(128) char shared[];
    float* partials = reinterpret_cast<float*>(shared);
    const SharedX shared_x = {shared + 2 * PARTIAL_FLOATS * sizeof(float), k_size * 2};
    const int warp = threadIdx.x / WARP_SIZE, num_spans = k_size / SPAN;
    const Weights weights = {tiles, scale, zero, n_size / BLOCK_ROWS, num_spans, group_spans};

    start_next_kernel();
    Position ahead = {static_cast<int>(blockIdx.x), warp};
    Position at = ahead;
    Stage stages[STAGES];
#pragma unroll
    for (int stage = 0; stage < STAGES; stage++) {
        weights.load(stages[stage], ahead);
        ahead.advance(warp, num_spans);
    }
    wait_for_previous_kernel();
    shared_x.fill(x, num_rows);
    __syncthreads();

    Sums sum;
    clear(sum);
    int parity = 0;
    while (true) {
#pragma unroll
        for (int stage = 0; stage < STAGES; stage++) {
            if (at.tile * TILE_ROWS >= n_size) return;
            if (at.span < num_spans) add_span(sum, stages[stage], shared_x, at.span);
            weights.load(stages[stage], ahead);
            ahead.advance(warp, num_spans);
            const int tile = at.tile;
            at.advance(warp, num_spans);
            if (at.tile == tile) continue;
            // The buffers alternate, so that the next tile's sums need no barrier.
            store_tile(sum, partials + parity * PARTIAL_FLOATS, tile, bias, out, num_rows, n_size);
            parity ^= 1;
        }
    }
}
