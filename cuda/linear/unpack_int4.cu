// unpack_int4: 4-bit weights to T: (weight - zero point) * scale, rounded once.
//
//   tiles, scale, zero (or null): int4.cuh -> out [N, K], aligned to 16 bytes; group_size: G
//   grid (ceil(N K / 1024 / WARPS)), block (32 WARPS): one tile per warp
//   reference: dequantise_int4 of model/ops/int4.py
//   roofline: 2.6 N K bytes (16-bit T); 0.85 of copy bandwidth
#include "common/int4.cuh"

constexpr int WARPS = 8;
constexpr int COLUMNS = 64;
constexpr int SIZE = Vec<T>::SIZE;
constexpr int VECS = COLUMNS / SIZE;       // per row
constexpr int STRIDE = COLUMNS + SIZE;  // rows begin in different banks

template <int I>
__device__ __forceinline__ void put(T* row, u32 word, int column, u32 zero, float scale) {
    const u32 low = word >> (4 * I) & 15u, high = word >> (16 + 4 * I) & 15u;
    row[column] = from_float<T>(static_cast<float>(static_cast<int>(low) - static_cast<int>(zero)) * scale);
    row[column + 1] = from_float<T>(static_cast<float>(static_cast<int>(high) - static_cast<int>(zero)) * scale);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    unpack_int4(const u8* tiles, const u16* scale, const u8* zero, T* out, int n_size, int k_size, int group_size) {
    __shared__ __align__(16) T shared[WARPS][BLOCK_ROWS * STRIDE];
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE, g = lane / 4, t = lane % 4;
    const int num_blocks = n_size / BLOCK_ROWS;
    const i64 tile = static_cast<i64>(blockIdx.x) * WARPS + warp;
    start_next_kernel();
    const int tiles_of_row = k_size / COLUMNS;
    if (tile >= static_cast<i64>(num_blocks) * tiles_of_row) return;
    const int block = tile / tiles_of_row, column_tile = tile % tiles_of_row, first = column_tile * COLUMNS;
    const i64 piece = static_cast<i64>(column_tile / 2) * num_blocks + block;
    const uint4 four = reinterpret_cast<const uint4*>(tiles + piece * SPAN_BYTES + column_tile % 2 * TILE_BYTES)[lane];
    const u32 words[4] = {four.x, four.y, four.z, four.w};
    T* rows = shared[warp];
#pragma unroll
    for (int s = 0; s < 4; s++) {
        const i64 group = static_cast<i64>((first + 16 * s) / group_size) * num_blocks + block;
        const float2 scales = widen_scales(reinterpret_cast<const u32*>(scale)[group * 8 + g]);
        u32 near = DEFAULT_ZERO, far = DEFAULT_ZERO;
        if (ZEROS) {
            const u32 both = reinterpret_cast<const u16*>(zero)[group * 8 + g];
            near = both & 0xffu;
            far = both >> 8;
        }
        const int column = 16 * s + 2 * t;
        put<0>(rows + g * STRIDE, words[s], column, near, scales.x);
        put<1>(rows + (g + 8) * STRIDE, words[s], column, far, scales.y);
        put<2>(rows + g * STRIDE, words[s], column + 8, near, scales.x);
        put<3>(rows + (g + 8) * STRIDE, words[s], column + 8, far, scales.y);
    }
    __syncwarp();
    wait_for_previous_kernel();
    T* to = out + static_cast<i64>(block) * BLOCK_ROWS * k_size + first;
#pragma unroll
    for (int n = 0; n < BLOCK_ROWS * VECS / WARP_SIZE; n++) {
        const int row = (n * WARP_SIZE + lane) / VECS, vec = (n * WARP_SIZE + lane) % VECS;
        store_vec(to + static_cast<i64>(row) * k_size + vec * SIZE, load_vec(rows + row * STRIDE + vec * SIZE));
    }
}
