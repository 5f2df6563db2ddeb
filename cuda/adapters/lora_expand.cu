// lora_expand: out[rows[m], n] += sum over splits c of shrunk[c, m, part of n] . b[slot, n] (LoRA expand).
//
//   shrunk float32 [C, M, P, R] of lora_shrink; b [S, N, R], scaled, finite beyond the rank; out [T, N]
//   rows int32 [M], tiles int32 [G, 3], ranks int32 [S]: as in lora_shrink
//   outputs of the P parts end at first_end, second_end, N (unused: N); all and R are multiples of 8
//   grid (sum over parts of ceil(columns / 512), G), block 256: a warp computes 64 columns of a tile
//   reference: NumpyOps.lora_expand. shrunk is multiplied as two 16-bit numbers that keep at least 16 of its bits
//   (float16: up to 65,504); added to `out` in float32, rounded once
//   roofline: as lora_shrink with N R elements, plus 2 M N of outputs
#include "common/mma.cuh"

constexpr int WARPS = 8;
constexpr int GROUPS = 2;                          // of 32 columns per warp
constexpr int WARP_COLUMNS = 32 * GROUPS;
constexpr int BLOCK_COLUMNS = WARPS * WARP_COLUMNS;
constexpr int COL_TILES = 4 * GROUPS;

struct Columns {
    int part, begin, end;  // of a block; `end` is its part's
};

__device__ __forceinline__ Columns columns_of(int block, int num_parts, const int (&ends)[3]) {
    Columns found = {0, 0, ends[0]};
    for (int part = 1; part < num_parts; part++) {
        const int num_blocks = (found.end - found.begin + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS;
        if (block < num_blocks) break;
        block -= num_blocks;
        found = {part, found.end, ends[part]};
    }
    found.begin += block * BLOCK_COLUMNS;
    return found;
}

#if QUIRE_DTYPE == 0

__device__ void expand_tile(T* out, const float* shrunk, const T* b, const int* rows, int count, int rank,
                            Columns columns, int num_splits, i64 split_stride, int width, int stride, int max_rank) {
    wait_for_previous_kernel();
    const int end = min(columns.begin + BLOCK_COLUMNS, columns.end);
    for (int n = columns.begin + static_cast<int>(threadIdx.x); n < end; n += blockDim.x) {
        for (int m = 0; m < count; m++) {
            float sum = 0.0f;
            for (int r = 0; r < rank; r++) {
                float input = 0.0f;
                for (int c = 0; c < num_splits; c++) input += shrunk[c * split_stride + m * stride + r];
                sum += input * b[static_cast<i64>(n) * max_rank + r];
            }
            out[static_cast<i64>(rows[m]) * width + n] += sum;
        }
    }
}

#else

// Column g of mma tile j is g / 2 * 8 + 2 j + g % 2 of 32, so four tiles give a lane 8 adjacent columns.
__device__ __forceinline__ void load_columns(uint2 (&to)[COL_TILES], const T* b, Columns columns, int first, int r,
                                             int rank, int max_rank) {
    const int g = threadIdx.x % WARP_SIZE / 4;
#pragma unroll
    for (int j = 0; j < COL_TILES; j++) {
        const int n = first + j / 4 * 32 + g / 2 * 8 + j % 4 * 2 + g % 2;
        const bool wanted = n < columns.end && r < rank;
        to[j] = wanted ? *reinterpret_cast<const uint2*>(b + static_cast<i64>(n) * max_rank + r) : uint2{};
    }
}

// Four elements of `shrunk` as rounded pairs and rounding errors.
struct Operands {
    u32 rounded[2], rest[2];
};

__device__ __forceinline__ Operands load_operands(const float* shrunk, int r, int rank, int num_splits,
                                                  i64 split_stride) {
    float4 sum = {};
    for (int c = 0; c < num_splits; c++) {
        const float4 more = *reinterpret_cast<const float4*>(shrunk + c * split_stride + r);
        sum = make_float4(sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w);
    }
    const float values[4] = {sum.x, r + 1 < rank ? sum.y : 0.0f, r + 2 < rank ? sum.z : 0.0f,
                             r + 3 < rank ? sum.w : 0.0f};  // undefined beyond the rank
    Operands operands;
#pragma unroll
    for (int pair = 0; pair < 2; pair++) {
        operands.rounded[pair] = pack_pair(values[2 * pair], values[2 * pair + 1]);
        const float2 known = unpack_pair(operands.rounded[pair]);
        operands.rest[pair] = pack_pair(values[2 * pair] - known.x, values[2 * pair + 1] - known.y);
    }
    return operands;
}

__device__ void expand_tile(T* out, const float* shrunk, const T* b, const int* rows, int count, int rank,
                            Columns columns, int num_splits, i64 split_stride, int width, int stride, int max_rank) {
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE, g = lane / 4, t = lane % 4;
    const int first = columns.begin + warp * WARP_COLUMNS;
    uint2 ahead[COL_TILES];
    load_columns(ahead, b, columns, first, t * 4, rank, max_rank);
    i64 row_starts[2 * ROW_TILES];
#pragma unroll
    for (int i = 0; i < 2 * ROW_TILES; i++) row_starts[i] = static_cast<i64>(rows[min(8 * i + g, count - 1)]) * width;
    wait_for_previous_kernel();
    if (first >= columns.end) return;

    float sums[ROW_TILES][COL_TILES][4] = {};
    for (int r = t * 4; r < rank + t * 4; r += 16) {
        uint2 now[COL_TILES];
#pragma unroll
        for (int j = 0; j < COL_TILES; j++) now[j] = ahead[j];
        load_columns(ahead, b, columns, first, r + 16, rank, max_rank);
#pragma unroll
        for (int i = 0; i < ROW_TILES; i++) {
            Operands operands[2] = {};
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int m = 16 * i + 8 * half + g;
                const float* inputs = shrunk + static_cast<i64>(m) * stride;
                if (m < count && r < rank) operands[half] = load_operands(inputs, r, rank, num_splits, split_stride);
            }
            const u32 rounded[4] = {operands[0].rounded[0], operands[1].rounded[0], operands[0].rounded[1],
                                    operands[1].rounded[1]};
            const u32 rest[4] = {operands[0].rest[0], operands[1].rest[0], operands[0].rest[1], operands[1].rest[1]};
#pragma unroll
            for (int j = 0; j < COL_TILES; j++) {
                mma_16x8x16(sums[i][j], rounded, now[j].x, now[j].y);
                mma_16x8x16(sums[i][j], rest, now[j].x, now[j].y);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 2 * ROW_TILES; i++) {
        const int m = 8 * i + g;
#pragma unroll
        for (int q = 0; q < GROUPS; q++) {
            const int n = first + 32 * q + 8 * t;
            if (m >= count || n >= columns.end) continue;
            T* at = out + row_starts[i] + n;
            Vec<T> values = load_vec(at);
#pragma unroll
            for (int e = 0; e < 8; e++)
                values.at[e] = from_float<T>(to_float(values.at[e]) + sums[i / 2][4 * q + e / 2][i % 2 * 2 + e % 2]);
            store_vec(at, values);
        }
    }
}

#endif

extern "C" __global__ void __launch_bounds__(WARPS * WARP_SIZE)
    lora_expand(T* out, const float* shrunk, const T* b, const int* rows, const int* tiles, const int* ranks,
                int num_splits, int num_rows, int width, int num_parts, int max_rank, int first_end, int second_end) {
    start_next_kernel();
    // Older than the step, as in lora_shrink.
    const int slot = tiles[3 * blockIdx.y], first = tiles[3 * blockIdx.y + 1], count = tiles[3 * blockIdx.y + 2];
    const int rank = ranks[slot], stride = num_parts * max_rank;
    if (count <= 0 || rank == 0) {
        wait_for_previous_kernel();  // else the next kernel would not wait for the previous one
        return;
    }
    const int ends[3] = {first_end, second_end, width};
    const Columns columns = columns_of(blockIdx.x, num_parts, ends);
    const float* inputs = shrunk + static_cast<i64>(first) * stride + columns.part * max_rank;
    const T* weights = b + static_cast<i64>(slot) * width * max_rank;
    expand_tile(out, inputs, weights, rows + first, count, rank, columns, num_splits,
                static_cast<i64>(num_rows) * stride, width, stride, max_rank);
}
