// lora_shrink: shrunk[c, m, o] = x[rows[m]] . a[slot, o] over split c of K (LoRA shrink, split-K).
//
//   x [T, K], a [S, P R, K], aligned to 16 bytes; shrunk float32 [C, M, P R]; o = p R + r, r below the rank
//   rows int32 [M]: rows of x, grouped by adapter; ranks int32 [S]; K, R multiples of 8, split_inputs of 256
//   tiles int32 [G, 3]: slot, first of `rows`, at most 16 ROW_TILES rows (0: padding)
//   grid (ceil(P R / (8 ROW_TILES)), G, C), block 128: four warps take chunks of 64 inputs in turn; 48 KiB of rings
//   reference: NumpyOps.lora_shrink; undefined beyond the rank, up to a multiple of 8
//   roofline: each adapter of the step read once, P rank K elements; x comes from L2 for every 8 ROW_TILES outputs
#include "common/mma.cuh"

constexpr int WARPS = 4;
constexpr int TILE_ROWS = 16 * ROW_TILES;
constexpr int COL_TILES = ROW_TILES;
constexpr int OUTPUTS = 8 * COL_TILES;
constexpr int CHUNK = 64;
constexpr int STEP = WARPS * CHUNK;
constexpr int STAGES = 4 / ROW_TILES;

struct Tile {
    int slot, first, num_rows;
};

#if QUIRE_DTYPE == 0

__device__ void shrink_tile(float* shrunk, const T* x, const T* a, const int* rows, Tile tile, int rank, int num_inputs,
                            int width, int max_rank, int output, int begin, int end) {
    wait_for_previous_kernel();
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    for (int o = output + warp; o < min(output + OUTPUTS, width); o += WARPS) {
        if (o % max_rank >= rank) continue;
        const T* weights = a + (static_cast<i64>(tile.slot) * width + o) * num_inputs;
        for (int m = tile.first; m < tile.first + tile.num_rows; m++) {
            const T* inputs = x + static_cast<i64>(rows[m]) * num_inputs;
            float sum = 0.0f;
            for (int k = begin + lane; k < end; k += WARP_SIZE) sum += inputs[k] * weights[k];
            sum = warp_sum(sum);
            if (lane == 0) shrunk[static_cast<i64>(m) * width + o] = sum;
        }
    }
}

#else

constexpr int VECS = CHUNK / 8;  // 16-byte vectors per row of a chunk
constexpr int ROW_BYTES = 2 * CHUNK;
constexpr int STAGE_BYTES = (OUTPUTS + TILE_ROWS) * ROW_BYTES;
constexpr int LANE_ROWS = WARP_SIZE / VECS;

// A lane's vectors of every LANE_ROWS-th of NUM rows.
template <int NUM>
struct Rows {
    const T* from[NUM / LANE_ROWS];  // null: zeros

    __device__ __forceinline__ void start_copies(u32 stage, const T* readable, int k, int end) const {
        const int lane = threadIdx.x % WARP_SIZE, row = lane / VECS, vec = lane % VECS;
#pragma unroll
        for (int n = 0; n < NUM / LANE_ROWS; n++) {
            const bool wanted = from[n] != nullptr && k + vec * 8 < end;
            const T* source = wanted ? from[n] + k + vec * 8 : readable;
            copy_async_16(stage + row_pair_offset<VECS>(row + n * LANE_ROWS, vec), source, wanted);
        }
    }
};

__device__ __forceinline__ void multiply(float (&sums)[ROW_TILES][COL_TILES][4], const char* stage) {
    const int lane = threadIdx.x % WARP_SIZE, g = lane / 4, t = lane % 4;
    const char* inputs = stage + OUTPUTS * ROW_BYTES;
#pragma unroll
    for (int c = 0; c < VECS; c += 4) {
        uint4 by[COL_TILES];
#pragma unroll
        for (int j = 0; j < COL_TILES; j++) by[j] = load_shared(stage + row_pair_offset<VECS>(8 * j + g, c + t));
#pragma unroll
        for (int i = 0; i < ROW_TILES; i++) {
            const uint4 low = load_shared(inputs + row_pair_offset<VECS>(16 * i + g, c + t));
            const uint4 high = load_shared(inputs + row_pair_offset<VECS>(16 * i + g + 8, c + t));
#pragma unroll
            for (int j = 0; j < COL_TILES; j++) mma_16x8x32(sums[i][j], low, high, by[j]);
        }
    }
}

__device__ void shrink_tile(float* shrunk, const T* x, const T* a, const int* rows, Tile tile, int rank, int num_inputs,
                            int width, int max_rank, int output, int begin, int end) {
    __shared__ __align__(128) char shared[WARPS * STAGES * STAGE_BYTES];
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    const char* ring = shared + warp * STAGES * STAGE_BYTES;
    const u32 ring_address = shared_address(ring);
    int k = begin + warp * CHUNK;

    Rows<OUTPUTS> weights;
#pragma unroll
    for (int n = 0; n < OUTPUTS / LANE_ROWS; n++) {
        const int o = output + lane / VECS + n * LANE_ROWS;
        const bool wanted = o < width && o / 8 * 8 % max_rank < rank;
        weights.from[n] = wanted ? a + (static_cast<i64>(tile.slot) * width + o) * num_inputs : nullptr;
    }
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; stage++)
        weights.start_copies(ring_address + stage * STAGE_BYTES, a, k + stage * STEP, end);
    Rows<TILE_ROWS> inputs;
#pragma unroll
    for (int n = 0; n < TILE_ROWS / LANE_ROWS; n++) {
        const int m = lane / VECS + n * LANE_ROWS;
        inputs.from[n] = m < tile.num_rows ? x + static_cast<i64>(rows[tile.first + m]) * num_inputs : nullptr;
    }
    wait_for_previous_kernel();
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; stage++) {
        inputs.start_copies(ring_address + stage * STAGE_BYTES + OUTPUTS * ROW_BYTES, x, k + stage * STEP, end);
        commit_copies();  // the first group has all weights so far
    }

    float sums[ROW_TILES][COL_TILES][4] = {};
    for (int stage = 0; k < end; k += STEP, stage = (stage + 1) % STAGES) {
        wait_for_copies<STAGES - 2>();
        __syncwarp();  // the stage has landed, the previous one is free
        const u32 next = ring_address + (stage + STAGES - 1) % STAGES * STAGE_BYTES;
        weights.start_copies(next, a, k + (STAGES - 1) * STEP, end);
        inputs.start_copies(next + OUTPUTS * ROW_BYTES, x, k + (STAGES - 1) * STEP, end);
        commit_copies();
        multiply(sums, ring + stage * STAGE_BYTES);
    }
    wait_for_copies<0>();
    __syncthreads();  // the rings are free

    float* partial = reinterpret_cast<float*>(shared);
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++) {
#pragma unroll
        for (int c = 0; c < 4 * COL_TILES; c++) {
            const int m = 16 * i + g + 8 * (c % 4 / 2), o = c / 4 * 8 + 2 * t + c % 2;
            partial[(warp * TILE_ROWS + m) * OUTPUTS + o] = sums[i][c / 4][c % 4];
        }
    }
    __syncthreads();
    for (int task = threadIdx.x; task < tile.num_rows * OUTPUTS; task += blockDim.x) {
        const int o = output + task % OUTPUTS;
        if (o >= width || o / 8 * 8 % max_rank >= rank) continue;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += partial[w * TILE_ROWS * OUTPUTS + task];
        shrunk[static_cast<i64>(tile.first + task / OUTPUTS) * width + o] = sum;
    }
}

#endif

extern "C" __global__ void __launch_bounds__(WARPS * WARP_SIZE)
    lora_shrink(float* shrunk, const T* x, const T* a, const int* rows, const int* tiles, const int* ranks,
                int num_rows, int num_inputs, int num_parts, int max_rank, int split_inputs) {
    start_next_kernel();
    // Tiles, ranks and adapters are older than the step: read before the previous kernel ends.
    const Tile tile = {tiles[3 * blockIdx.y], tiles[3 * blockIdx.y + 1], tiles[3 * blockIdx.y + 2]};
    const int width = num_parts * max_rank, output = blockIdx.x * OUTPUTS, rank = ranks[tile.slot];
    const int begin = blockIdx.z * split_inputs, end = min(begin + split_inputs, num_inputs);
    bool has_outputs = false;
    for (int o = output; o < min(output + OUTPUTS, width); o += 8) has_outputs |= o % max_rank < rank;
    if (tile.num_rows <= 0 || !has_outputs) {
        wait_for_previous_kernel();  // else the next kernel would not wait for the previous one
        return;
    }
    shrink_tile(shrunk + static_cast<i64>(blockIdx.z) * num_rows * width, x, a, rows, tile, rank, num_inputs, width,
                max_rank, output, begin, end);
}
