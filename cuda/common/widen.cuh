// Exact widening of 8-bit weights to 16 bits: e4m3 without NaN, or int8 (WEIGHT_INT8).
#pragma once

#include "common/types.cuh"

using u8 = unsigned char;
using u16 = unsigned short;

// Two e4m3 in bytes 1 and 3.
__device__ __forceinline__ u32 e4m3_as_float16(u32 bytes) {
    // Exponent biases differ by 8.
    const u32 moved = (bytes & 0x80008000u) | ((bytes >> 1) & 0x3f803f80u);
    const __half2 pair = __hmul2(*reinterpret_cast<const __half2*>(&moved), __float2half2_rn(256.0f));
    return *reinterpret_cast<const u32*>(&pair);
}

// The low or high two e4m3 of a word.
template <int HIGH>
__device__ __forceinline__ u32 widen_to_float16(u32 four) {
#if __CUDA_ARCH__ >= 890
    u32 pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<u16>(four >> (16 * HIGH))));
    return pair;
#else
    return e4m3_as_float16(__byte_perm(four, 0, HIGH ? 0x3424 : 0x1404));
#endif
}

#if QUIRE_DTYPE != 0
// The low or high two weights of a word, in T.
template <int HIGH>
__device__ __forceinline__ u32 widen(u32 four) {
#if WEIGHT_INT8
    // x = (OFFSET + x's low seven bits) - (OFFSET + its sign bit); OFFSET is a power of two.
    const u32 bytes = __byte_perm(four, 0, HIGH ? 0x4342 : 0x4140);
#if QUIRE_DTYPE == 1
    using Pair = __half2;
    constexpr u32 OFFSET = 0x64006400u;  // 1024 twice
#else
    using Pair = __nv_bfloat162;
    constexpr u32 OFFSET = 0x43004300u;  // 128 twice: with the sign bit it is 256
#endif
    const u32 low = (bytes & 0x007f007fu) | OFFSET, sign = (bytes & 0x00800080u) | OFFSET;
    const Pair pair = __hsub2(*reinterpret_cast<const Pair*>(&low), *reinterpret_cast<const Pair*>(&sign));
    return *reinterpret_cast<const u32*>(&pair);
#else
    const u32 bytes = __byte_perm(four, 0, HIGH ? 0x3424 : 0x1404);
#if QUIRE_DTYPE == 1
    return e4m3_as_float16(bytes);
#else
    // As e4m3_as_float16; the biases differ by 120.
    const u32 moved = (bytes & 0x80008000u) | ((bytes >> 4) & 0x07f007f0u);
    const __nv_bfloat162 pair =
        __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&moved), __float2bfloat162_rn(0x1p120f));
    return *reinterpret_cast<const u32*>(&pair);
#endif
#endif
}
#endif
