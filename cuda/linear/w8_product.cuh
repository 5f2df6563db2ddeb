// The product of gemv_w8 and experts_gemv_w8: weights widen to 16 bits in registers; e4m3 x multiplies exactly as
// float16.
#pragma once

#include "common/widen.cuh"
#include "linear/gemv.cuh"

#if X_FP8
using X = u8;
#else
using X = T;
#endif
constexpr int SCALE_BLOCK = 128;
static_assert(!BLOCK_SCALES || (SPAN == SCALE_BLOCK && SCALE_BLOCK % TILE_ROWS == 0), "a span has one scale");

struct Product {
    const float* x_scale;
    const float* weight_scale;
    const T* bias;
    int k_size;
    GemvSums of_span;  // with BLOCK_SCALES
    float span_scale;

    using Operand = u32[8];  // pairs of 16 elements of K
    using XVecs = uint4[Gemv<u8, X>::X_VECS];

    __device__ __forceinline__ void begin_span(int tile, int k) {
#if BLOCK_SCALES
        const int columns = (k_size + SCALE_BLOCK - 1) / SCALE_BLOCK;
        span_scale = k < k_size ? __ldg(weight_scale + tile / SCALE_BLOCK * columns + k / SCALE_BLOCK) : 0.0f;
#pragma unroll
        for (int n = 0; n < ROW_TILES * COL_TILES * 4; n++) of_span[n / 4 / COL_TILES][n / 4 % COL_TILES][n % 4] = 0.0f;
#endif
    }
    __device__ __forceinline__ void end_span(GemvSums& sum) {
#if BLOCK_SCALES
#pragma unroll
        for (int n = 0; n < ROW_TILES * COL_TILES * 4; n++) {
            const int i = n / 4 / COL_TILES, j = n / 4 % COL_TILES;
            sum[i][j][n % 4] = fmaf(of_span[i][j][n % 4], span_scale, sum[i][j][n % 4]);
        }
#endif
    }
    __device__ __forceinline__ void widen(Operand& to, uint4 from) const {
        const u32 words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
#if X_FP8
            to[2 * i] = widen_to_float16<0>(words[i]);
            to[2 * i + 1] = widen_to_float16<1>(words[i]);
#else
            to[2 * i] = ::widen<0>(words[i]);
            to[2 * i + 1] = ::widen<1>(words[i]);
#endif
        }
    }
    __device__ __forceinline__ void widen_x(Operand& to, const XVecs& from) const {
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
    __device__ __forceinline__ void multiply(GemvSums& sum, int i, int j, const Operand& low, const Operand& high,
                                             const Operand& x) {
        float(&to)[4] = BLOCK_SCALES ? of_span[i][j] : sum[i][j];
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
            const u32 a[4] = {low[n], high[n], low[n + 1], high[n + 1]};
#if X_FP8
            asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                "{%0, %1, %2, %3};"
                : "+f"(to[0]), "+f"(to[1]), "+f"(to[2]), "+f"(to[3])
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(x[n]), "r"(x[n + 1]));
#else
            mma_16x8x16(to, a, x[n], x[n + 1]);
#endif
        }
    }
    __device__ __forceinline__ float start(int) const { return 0.0f; }
    __device__ __forceinline__ float finish(float total, int m, int n) const {
        if (!BLOCK_SCALES) total *= weight_scale[n];
        if (x_scale != nullptr) total *= x_scale[m];
        if (bias != nullptr) total += to_float(bias[n]);
        return total;
    }
};
