// gemv_fp8: out[m] = (x[m] @ weight.T) * x_scale[m] * weight_scale + bias, weight in e4m3, for a few
// rows; bound by reading the weights once.
//
//   x [M, K], of the build's type with x_scale null (X_FP8 0) or e4m3 with x_scale float32 [M] (X_FP8 1);
//   weight e4m3 [N, K] without NaN, weight_scale float32 [N], bias [N] or null, out [M, N]; M <= 8 COL_TILES
//   A build defines WARPS, ROW_TILES, COL_TILES, SPAN and STAGES as for gemv.cu, X_FP8, and OUT_FLOAT: out has the
//   build's type (0) or float32 (1).
//   grid (up to ceil(N / (16 ROW_TILES))), block (32 WARPS), dynamic shared memory SHARED_BYTES: as in gemv. The order
//   of sums depends on K and the build alone: a row of x gives the same bits in any batch.
//   reference: NumpyOps.linear
//   needs: x and weight aligned to 16 bytes, K a multiple of 16
//   roofline: N K bytes moved; 0.9 of copy bandwidth from 64 MB of weights in e4m3, 0.8 with x of 16 bits
//
// Weights are widened to 16 bits in registers, which is exact. e4m3 rows of x are multiplied as float16, which holds
// both operands exactly.
#include "common/fp8.cuh"
#include "common/mma.cuh"

#if QUIRE_DTYPE == 0
#error "the tensor cores take float16 and bfloat16"
#endif
#if OUT_FLOAT
using Out = float;
#else
using Out = T;
#endif
#if X_FP8
using X = u8;
#else
using X = T;
#endif

constexpr int MMA_COLS = 8;                    // of an mma's B, which are rows of x
constexpr int MAX_ROWS = MMA_COLS * COL_TILES;
constexpr int TILE_ROWS = 16 * ROW_TILES;
constexpr int SIZE = 16;                       // weights in a vector
constexpr int VECS = SPAN / SIZE;              // of a weight row in a stage
constexpr int CHUNK = 4 * SIZE;                // elements of K in four mma: a vector for each of a row's four lanes
constexpr int CHUNKS = SPAN / CHUNK;
constexpr int X_VECS = SIZE * sizeof(X) / 16;  // of x for one of weights
constexpr int STAGE_BYTES = TILE_ROWS * SPAN;
constexpr int COPIES = TILE_ROWS * VECS / WARP_SIZE;  // of a lane for one stage
constexpr int RING_BYTES = WARPS * STAGES * STAGE_BYTES;
constexpr int PARTIAL_FLOATS = WARPS * MAX_ROWS * TILE_ROWS;
[[maybe_unused]] constexpr int SHARED_BYTES = RING_BYTES + 2 * PARTIAL_FLOATS * sizeof(float);
static_assert(VECS % 8 == 0 && WARP_SIZE % VECS == 0, "a row of a stage fills whole lines of 128 bytes");

// The byte offset of a weight vector in its stage. Odd rows swap the halves of each 128 bytes, so that eight lanes that
// read together (two rows, four vectors each) touch all banks.
__device__ __forceinline__ int shared_offset(int row, int vec) { return (row * VECS + (vec ^ (row % 2 * 4))) * 16; }

// A warp's position in the weights: its spans of K in one tile, then in the next.
struct WeightPosition {
    int tile;  // first weight row
    int k;     // first element of K

    __device__ __forceinline__ void advance(int warp, int k_size) {
        k += WARPS * SPAN;
        if (k - warp * SPAN >= k_size) {
            k = warp * SPAN;
            tile += gridDim.x * TILE_ROWS;
        }
    }
};

__device__ __forceinline__ void start_copies(u32 stage, const u8* weight, WeightPosition at, int n_size, int k_size) {
    const int lane = threadIdx.x % WARP_SIZE;
    const int first = lane / VECS, vec = lane % VECS, k = at.k + vec * SIZE;
    const u8* from = weight + static_cast<i64>(at.tile + first) * k_size + k;
#pragma unroll
    for (int n = 0; n < COPIES; n++) {
        const int row = first + n * (WARP_SIZE / VECS);
        const bool wanted = k < k_size && at.tile + row < n_size;
        copy_async_16(stage + shared_offset(row, vec), wanted ? from : weight, wanted);
        from += static_cast<i64>(WARP_SIZE / VECS) * k_size;
    }
    commit_copies();
}

// Two e4m3 of a word, the low two or the high two, as 16-bit elements.
template <int HIGH>
__device__ __forceinline__ u32 widen(u32 four) {
#if X_FP8 && __CUDA_ARCH__ >= 890
    u32 pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<u16>(four >> (16 * HIGH))));
    return pair;
#else
    // Sign, exponent and mantissa are shifted; the exponents' biases differ by a factor of 2^120 or 2^8.
    const u32 bytes = __byte_perm(four, 0, HIGH ? 0x3424 : 0x1404);
#if X_FP8 || QUIRE_DTYPE == 1
    const u32 moved = (bytes & 0x80008000u) | ((bytes >> 1) & 0x3f803f80u);
    const __half2 pair = __hmul2(*reinterpret_cast<const __half2*>(&moved), __float2half2_rn(256.0f));
#else
    const u32 moved = (bytes & 0x80008000u) | ((bytes >> 4) & 0x07f007f0u);
    const __nv_bfloat162 pair =
        __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&moved), __float2bfloat162_rn(0x1p120f));
#endif
    return *reinterpret_cast<const u32*>(&pair);
#endif
}

using Pairs = u32[8];  // 16 elements of K

__device__ __forceinline__ void widen(Pairs& to, uint4 from) {
    const u32 words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        to[2 * i] = widen<0>(words[i]);
        to[2 * i + 1] = widen<1>(words[i]);
    }
}

__device__ __forceinline__ void widen(Pairs& to, const uint4 (&from)[X_VECS]) {
#if X_FP8
    widen(to, from[0]);
#else
#pragma unroll
    for (int i = 0; i < 2; i++) {
        to[4 * i] = from[i].x;
        to[4 * i + 1] = from[i].y;
        to[4 * i + 2] = from[i].z;
        to[4 * i + 3] = from[i].w;
    }
#endif
}

// An mma sums over 16 elements of K in any order: where weight and x agree, a lane's fragments can be
// the 16 elements that lie together in memory.
__device__ __forceinline__ void multiply(float (&sum)[4], const Pairs& low, const Pairs& high, const Pairs& x) {
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        const u32 a[4] = {low[i], high[i], low[i + 1], high[i + 1]};
#if X_FP8
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(x[i]), "r"(x[i + 1]));
#else
        mma_16x8x16(sum, a, x[i], x[i + 1]);
#endif
    }
}

__device__ __forceinline__ uint4 load_shared(const char* from) { return *reinterpret_cast<const uint4*>(from); }

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    gemv_fp8(const X* x, const float* x_scale, const u8* weight, const float* weight_scale, const T* bias,
                      Out* out, int num_rows, int n_size, int k_size) {
    extern __shared__ __align__(128) char shared[];
    float* partials = reinterpret_cast<float*>(shared + RING_BYTES);
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    const int g = lane / 4, t = lane % 4;
    const char* ring = shared + warp * STAGES * STAGE_BYTES;
    const u32 ring_address = shared_address(ring);

    start_next_kernel();
    WeightPosition ahead = {static_cast<int>(blockIdx.x) * TILE_ROWS, warp * SPAN};
    WeightPosition at = ahead;
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; stage++) {
        start_copies(ring_address + stage * STAGE_BYTES, weight, ahead, n_size, k_size);
        ahead.advance(warp, k_size);
    }
    wait_for_previous_kernel();

    // Columns past the last row of x repeat it; their results are not written.
    const X* x_rows[COL_TILES];
#pragma unroll
    for (int j = 0; j < COL_TILES; j++)
        x_rows[j] = x + static_cast<i64>(min(j * MMA_COLS + g, num_rows - 1)) * k_size + t * SIZE;
    float sum[ROW_TILES][COL_TILES][4] = {};
    int stage = 0, parity = 0;
    while (at.tile < n_size) {
        uint4 by[CHUNKS][COL_TILES][X_VECS];
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            const int k = at.k + c * CHUNK;
#pragma unroll
            for (int j = 0; j < COL_TILES; j++) {
#pragma unroll
                for (int v = 0; v < X_VECS; v++)
                    by[c][j][v] = k + t * SIZE < k_size ? reinterpret_cast<const uint4*>(x_rows[j] + k)[v] : uint4{};
            }
        }
        wait_for_copies<STAGES - 2>();
        __syncwarp();  // the stage has landed, and all lanes have read the previous one
        start_copies(ring_address + (stage + STAGES - 1) % STAGES * STAGE_BYTES, weight, ahead, n_size, k_size);
        ahead.advance(warp, k_size);
        const char* held = ring + stage * STAGE_BYTES;
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            Pairs columns[COL_TILES];
#pragma unroll
            for (int j = 0; j < COL_TILES; j++) widen(columns[j], by[c][j]);
#pragma unroll
            for (int i = 0; i < ROW_TILES; i++) {
                Pairs low, high;
                widen(low, load_shared(held + shared_offset(i * 16 + g, c * 4 + t)));
                widen(high, load_shared(held + shared_offset(i * 16 + g + 8, c * 4 + t)));
#pragma unroll
                for (int j = 0; j < COL_TILES; j++) multiply(sum[i][j], low, high, columns[j]);
            }
        }
        stage = (stage + 1) % STAGES;
        const int tile = at.tile;
        at.advance(warp, k_size);
        if (at.tile == tile) continue;

        float* partial = partials + parity * PARTIAL_FLOATS;
        parity ^= 1;  // double-buffered: the next tile's sums need no barrier
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
        for (int task = threadIdx.x; task < num_rows * TILE_ROWS; task += blockDim.x) {
            const int m = task / TILE_ROWS, n = tile + task % TILE_ROWS;
            if (n >= n_size) continue;
            float total = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; w++) total += partial[w * MAX_ROWS * TILE_ROWS + task];
            total *= weight_scale[n];
            if (x_scale != nullptr) total *= x_scale[m];
            if (bias != nullptr) total += to_float(bias[n]);
            out[static_cast<i64>(m) * n_size + n] = from_float<Out>(total);
        }
    }
}
