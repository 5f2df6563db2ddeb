// dequantise_rows: out[t] = x[t] * scale[t].
//
//   x [T, K] e4m3, with WEIGHT_INT8 int8; scale float32 [T], with BLOCK_SCALES [ceil(T / 128), ceil(K / 128)]
//   out [T, K]
//   grid (T, ceil(K / 4096)), block (256)
//   reference: NumpyOps.dequantise_rows, bit for bit
//   roofline: T K bytes read, T K elements written; 0.85 of copy bandwidth from 32 MB
#include "common/fp8.cuh"

#ifndef WEIGHT_INT8
#define WEIGHT_INT8 0
#endif
#ifndef BLOCK_SCALES
#define BLOCK_SCALES 0
#endif

__device__ __forceinline__ float widened(u8 x) {
    if (WEIGHT_INT8) return static_cast<float>(static_cast<signed char>(x));
    return e4m3_to_float(x);
}

extern "C" __global__ void __launch_bounds__(256) dequantise_rows(const u8* x, const float* scale, T* out, int width) {
    start_next_kernel();
    wait_for_previous_kernel();
    constexpr int TAKEN = 16, SIZE = Vec<T>::SIZE, BLOCK = 128;
    const int i = (blockIdx.y * blockDim.x + threadIdx.x) * TAKEN;
    if (i >= width) return;
    const i64 start = static_cast<i64>(blockIdx.x) * width + i;
    const i64 block = static_cast<i64>(blockIdx.x / BLOCK) * ((width + BLOCK - 1) / BLOCK) + i / BLOCK;
    const float by = scale[BLOCK_SCALES ? block : blockIdx.x];
    if (width % TAKEN == 0 && is_aligned_16(x) && is_aligned_16(out)) {
        const Vec<u8> from = load_vec(x + start);
#pragma unroll
        for (int n = 0; n < TAKEN; n += SIZE) {
            Vec<T> to;
#pragma unroll
            for (int j = 0; j < SIZE; j++) to.at[j] = from_float<T>(widened(from.at[n + j]) * by);
            store_vec(out + start + n, to);
        }
    } else {
        for (int j = 0; j < min(TAKEN, width - i); j++) out[start + j] = from_float<T>(widened(x[start + j]) * by);
    }
}
