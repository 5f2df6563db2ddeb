// e4m3 ("fn": no infinity, NaN 0x7f and 0xff, largest 448): rounding a row with one scale, exact widening.
#pragma once

#include "common/types.cuh"

using u8 = unsigned char;
using u16 = unsigned short;

constexpr float E4M3_MAX = 448.0f;
constexpr float MIN_SCALE = 1e-12f;  // MIN_SCALE of model/ops/fp8.py

#if __CUDA_ARCH__ >= 890

// Rounds to nearest even, `low` in the low byte; NaN stays NaN.
__device__ __forceinline__ u16 e4m3_pair(float low, float high) {
    u16 pair;
    asm("{cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1;}\n" : "=h"(pair) : "f"(low), "f"(high));
    return pair;
}

__device__ __forceinline__ float e4m3_to_float(u8 x) {
    u32 pair;
    float out;
    asm("{cvt.rn.f16x2.e4m3x2 %0, %1;}\n" : "=r"(pair) : "h"(static_cast<u16>(x)));
    asm("{cvt.f32.f16 %0, %1;}\n" : "=f"(out) : "h"(static_cast<u16>(pair)));
    return out;
}

#else

#include <cuda_fp8.h>

__device__ __forceinline__ u16 e4m3_pair(float low, float high) {
    return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
}

__device__ __forceinline__ float e4m3_to_float(u8 x) {
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(x, __NV_E4M3)));
}

#endif

// Widens bytes 2 HALF and 2 HALF + 1; NaN stays NaN.
template <int HALF>
__device__ __forceinline__ u32 e4m3_to_f16(u32 four) {
#if __CUDA_ARCH__ >= 890
    u32 pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<u16>(four >> (16 * HALF))));
    return pair;
#else
    // Exponent biases differ by 8. Adding 1 carries into the sign bit only for NaN: the exponent becomes all ones.
    const u32 unsigned_bytes = four & 0x7f7f7f7fu;
    const u32 marked = unsigned_bytes | ((unsigned_bytes + 0x01010101u) & 0x80808080u);
    const u32 high = __byte_perm(marked, 0, HALF ? 0x3424 : 0x1404), sign = __byte_perm(four, 0, HALF ? 0x3424 : 0x1404);
    const u32 moved = (high >> 1) | (sign & 0x80008000u);
    const __half2 pair = __hmul2(*reinterpret_cast<const __half2*>(&moved), __float2half2_rn(256.0f));
    return *reinterpret_cast<const u32*>(&pair);
#endif
}

// Bits of |x|, ordered as the numbers, NaN above infinity.
__device__ __forceinline__ u32 magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// Scale of a row whose largest magnitude has these bits; NaN if an element is.
__device__ __forceinline__ float scale_of(u32 largest) {
    const float scale = __uint_as_float(largest) / E4M3_MAX;
    return scale < MIN_SCALE ? MIN_SCALE : scale;
}

// Vectors of a row per thread; longer rows are computed twice.
constexpr int HELD_VECS = 4;

__device__ __forceinline__ bool fits_in_registers(int width) {
    return width <= HELD_VECS * static_cast<int>(blockDim.x) * Vec<T>::SIZE;
}

// f(vector, index of its first element) for each vector of this thread.
template <typename F>
__device__ __forceinline__ void for_each_vec(Vec<T> (&row)[HELD_VECS], int width, F f) {
#pragma unroll
    for (int n = 0; n < HELD_VECS; n++) {
        const int i = (n * blockDim.x + threadIdx.x) * Vec<T>::SIZE;
        if (i < width) f(row[n], i);
    }
}

// Quantises the block's part of a row; row_max(own) is the maximum over the whole row.
template <typename RowMax>
__device__ __forceinline__ void quantise_held(Vec<T> (&row)[HELD_VECS], int width, u8* out, float* scale,
                                              RowMax row_max) {
    constexpr int SIZE = Vec<T>::SIZE;
    u32 largest = 0;
    for_each_vec(row, width, [&](Vec<T>& vec, int) {
#pragma unroll
        for (int j = 0; j < SIZE; j++) largest = max(largest, magnitude(to_float(vec.at[j])));
    });
    const float by = scale_of(row_max(largest)), inverse = 1.0f / by;
    for_each_vec(row, width, [&](Vec<T>& vec, int i) {
        struct alignas(SIZE) { u16 at[SIZE / 2]; } pairs;
#pragma unroll
        for (int j = 0; j < SIZE; j += 2)
            pairs.at[j / 2] = e4m3_pair(to_float(vec.at[j]) * inverse, to_float(vec.at[j + 1]) * inverse);
        *reinterpret_cast<decltype(pairs)*>(out + i) = pairs;
    });
    if (threadIdx.x == 0) *scale = by;
}

__device__ __forceinline__ void quantise_held(Vec<T> (&row)[HELD_VECS], int width, u8* out, float* scale) {
    quantise_held(row, width, out, scale, [](u32 own) { return block_max(own, 0u); });
}

// element(i) is called twice.
template <typename Element>
__device__ __forceinline__ void quantise_elements(Element element, int width, u8* out, float* scale) {
    u32 largest = 0;
    for (int i = threadIdx.x; i < width; i += blockDim.x) largest = max(largest, magnitude(to_float(element(i))));
    const float by = scale_of(block_max(largest, 0u)), inverse = 1.0f / by;
    for (int i = threadIdx.x; i < width; i += blockDim.x)
        out[i] = static_cast<u8>(e4m3_pair(to_float(element(i)) * inverse, 0.0f));
    if (threadIdx.x == 0) *scale = by;
}
