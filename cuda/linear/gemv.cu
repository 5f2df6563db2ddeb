// gemv: out[m] = x[m] @ weight.T + bias for a few rows; bound by reading the weights once.
//
//   x [M, K], weight [N, K], bias [N] or null, out [M, N]; M <= 8 COL_TILES
//   A build defines WARPS (a block), ROW_TILES (weight rows of a tile, in sixteens), COL_TILES (rows of x, in eights),
//   SPAN (elements of K in a warp's step), STAGES (of a warp's ring in shared memory), OUT_FLOAT: out has the build's
//   type (0) or float32 (1).
//   grid (up to ceil(N / (16 ROW_TILES))), block (32 WARPS), dynamic shared memory SHARED_BYTES: persistent blocks. The
//   warps of a block split K, and their sums are added in the order of the warps: results are deterministic. Each warp
//   keeps STAGES - 1 spans of weights in flight, the first of them from before the previous kernel has ended.
//   reference: NumpyOps.linear
//   needs: x and weight aligned to 16 bytes, K a multiple of 8, 16-bit elements
//   roofline: N K elements moved; 0.9 of copy bandwidth from 64 MB of weights
#include "common/mma.cuh"

#if QUIRE_DTYPE == 0
#error "the tensor cores take float16 and bfloat16"
#endif
#if OUT_FLOAT
using Out = float;
#else
using Out = T;
#endif

constexpr int MMA_COLS = 8;                    // of an mma's B, which are rows of x
constexpr int MAX_ROWS = MMA_COLS * COL_TILES;
constexpr int TILE_ROWS = 16 * ROW_TILES;
constexpr int SIZE = Vec<T>::SIZE;
constexpr int VECS = SPAN / SIZE;              // of a weight row in a stage
constexpr int CHUNK = 4 * SIZE;                // elements of K in two mma: a vector for each of the four lanes of a row
constexpr int CHUNKS = SPAN / CHUNK;
constexpr int STAGE_BYTES = TILE_ROWS * SPAN * sizeof(T);
constexpr int COPIES = TILE_ROWS * VECS / WARP_SIZE;  // of a lane for one stage
constexpr int RING_BYTES = WARPS * STAGES * STAGE_BYTES;
constexpr int PARTIAL_FLOATS = WARPS * MAX_ROWS * TILE_ROWS;
constexpr int SHARED_BYTES = RING_BYTES + 2 * PARTIAL_FLOATS * sizeof(float);
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

__device__ __forceinline__ void start_copies(u32 stage, const T* weight, WeightPosition at, int n_size, int k_size) {
    const int lane = threadIdx.x % WARP_SIZE;
    const int first = lane / VECS, vec = lane % VECS, k = at.k + vec * SIZE;
    const T* from = weight + static_cast<i64>(at.tile + first) * k_size + k;
#pragma unroll
    for (int n = 0; n < COPIES; n++) {
        const int row = first + n * (WARP_SIZE / VECS);
        const bool wanted = k < k_size && at.tile + row < n_size;
        copy_async_16(stage + shared_offset(row, vec), wanted ? from : weight, wanted);
        from += static_cast<i64>(WARP_SIZE / VECS) * k_size;
    }
    commit_copies();
}

__device__ __forceinline__ uint4 load_shared(const char* from) { return *reinterpret_cast<const uint4*>(from); }

// An mma sums over 16 elements of K in any order: where weight and x agree, a lane's fragments can be
// the 16 bytes that lie together in memory.
__device__ __forceinline__ void multiply(float (&sum)[4], uint4 low, uint4 high, uint4 x) {
    const u32 first[4] = {low.x, high.x, low.y, high.y};
    const u32 second[4] = {low.z, high.z, low.w, high.w};
    mma_16x8x16(sum, first, x.x, x.y);
    mma_16x8x16(sum, second, x.z, x.w);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    gemv(const T* x, const T* weight, const T* bias, Out* out, int num_rows, int n_size, int k_size) {
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
    const T* x_rows[COL_TILES];
#pragma unroll
    for (int j = 0; j < COL_TILES; j++)
        x_rows[j] = x + static_cast<i64>(min(j * MMA_COLS + g, num_rows - 1)) * k_size + t * SIZE;
    float sum[ROW_TILES][COL_TILES][4] = {};
    int stage = 0, parity = 0;
    while (at.tile < n_size) {
        uint4 by[CHUNKS][COL_TILES];
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            const int k = at.k + c * CHUNK;
#pragma unroll
            for (int j = 0; j < COL_TILES; j++)
                by[c][j] = k + t * SIZE < k_size ? *reinterpret_cast<const uint4*>(x_rows[j] + k) : uint4{};
        }
        wait_for_copies<STAGES - 2>();
        __syncwarp();  // the stage has landed, and all lanes have read the previous one
        start_copies(ring_address + (stage + STAGES - 1) % STAGES * STAGE_BYTES, weight, ahead, n_size, k_size);
        ahead.advance(warp, k_size);
        const char* held = ring + stage * STAGE_BYTES;
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
#pragma unroll
            for (int i = 0; i < ROW_TILES; i++) {
                const uint4 low = load_shared(held + shared_offset(i * 16 + g, c * 4 + t));
                const uint4 high = load_shared(held + shared_offset(i * 16 + g + 8, c * 4 + t));
#pragma unroll
                for (int j = 0; j < COL_TILES; j++) multiply(sum[i][j], low, high, by[c][j]);
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
            float total = bias == nullptr ? 0.0f : to_float(bias[n]);
#pragma unroll
            for (int w = 0; w < WARPS; w++) total += partial[w * MAX_ROWS * TILE_ROWS + task];
            out[static_cast<i64>(m) * n_size + n] = from_float<Out>(total);
        }
    }
}
