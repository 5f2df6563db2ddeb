// 4-bit weights (N a multiple of 16, K of 128) in tiles of 16 rows x 64 columns, in mma fragment order; a span of 128
// columns is adjacent for all rows.
//
//   tiles  u32 [K / 128, N / 16, 2 halves, 32 lanes, 4]: word s of lane 4g + t holds columns 16s + 2t, + 1, + 8, + 9 of
//          its half of rows g and g + 8, the A fragment of mma.cuh; register i is bits 4i (low element) and 4i + 16
//   scale  16-bit [K / G, N / 16, 16], zero u8 alike: rows g and g + 8 are elements 2g and 2g + 1
//
// Build macros: GROUPS per span: 1 (G >= 128), 2, 4; ZEROS: 0 if all zero points are 8; SCALE_BF16: 0 for float16.
#pragma once

#include "common/mma.cuh"

using u8 = unsigned char;
using u16 = unsigned short;

constexpr int SPAN = 128;
constexpr int BLOCK_ROWS = 16;
constexpr int TILE_BYTES = 512;
constexpr int SPAN_BYTES = 2 * TILE_BYTES;
constexpr int SCALE_BYTES = BLOCK_ROWS * 2;
constexpr int ZERO_BYTES = ZEROS ? BLOCK_ROWS : 0;
constexpr int STEPS = SPAN / 16;  // per span
constexpr int GROUP_STEPS = STEPS / GROUPS;
constexpr int DEFAULT_ZERO = 8;
static_assert(GROUPS == 1 || GROUPS == 2 || GROUPS == 4, "groups of 32, 64, or 128 and more inputs");

// OFFSET with q in its mantissa at RAISED_BIT is OFFSET + q.
#if QUIRE_DTYPE == 1
constexpr u32 RAISED = 0x54005400u;  // 64 twice
constexpr int RAISED_BIT = 4;
constexpr float OFFSET = 64.0f;
#else
constexpr u32 RAISED = 0x43004300u;  // 128 twice
constexpr int RAISED_BIT = 0;
constexpr float OFFSET = 128.0f;
#endif

// Register I of the fragment of `word`, plus OFFSET.
template <int I>
__device__ __forceinline__ u32 raised(u32 word) {
    constexpr int SHIFT = 4 * I - RAISED_BIT;
    const u32 moved = SHIFT < 0 ? word << (SHIFT < 0 ? -SHIFT : 0) : word >> (SHIFT < 0 ? 0 : SHIFT);
    u32 fragment;  // (moved & mask) | RAISED in one instruction: the compiler emits two
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(fragment) : "r"(moved), "n"(0x000f000fu << RAISED_BIT), "r"(RAISED));
    return fragment;
}

__device__ __forceinline__ u32 raised_zero(u32 zero) { return (zero << RAISED_BIT) * 0x00010001u | RAISED; }

#if QUIRE_DTYPE != 0
#if QUIRE_DTYPE == 1
using Pair = __half2;
#else
using Pair = __nv_bfloat162;
#endif

__device__ __forceinline__ u32 subtract_pair(u32 a, u32 b) {
    const Pair pair = __hsub2(*reinterpret_cast<const Pair*>(&a), *reinterpret_cast<const Pair*>(&b));
    return *reinterpret_cast<const u32*>(&pair);
}

__device__ __forceinline__ u32 multiply_pair(u32 a, u32 b) {
    const Pair pair = __hmul2(*reinterpret_cast<const Pair*>(&a), *reinterpret_cast<const Pair*>(&b));
    return *reinterpret_cast<const u32*>(&pair);
}
#endif

// Zero points of rows g and g + 8, raised.
struct Zeros {
    u32 near, far;

    __device__ __forceinline__ Zeros() : near(raised_zero(DEFAULT_ZERO)), far(near) {}
    __device__ __forceinline__ Zeros(u16 both) : near(raised_zero(both & 0xffu)), far(raised_zero(both >> 8)) {}
};

#if QUIRE_DTYPE != 0
// The fragment minus zero points, exact.
__device__ __forceinline__ void unpack(u32 (&a)[4], u32 word, const Zeros& zeros) {
    a[0] = subtract_pair(raised<0>(word), zeros.near);
    a[1] = subtract_pair(raised<1>(word), zeros.far);
    a[2] = subtract_pair(raised<2>(word), zeros.near);
    a[3] = subtract_pair(raised<3>(word), zeros.far);
}
#endif

// Scales of rows g and g + 8.
__device__ __forceinline__ float2 widen_scales(u32 both) {
#if SCALE_BF16
    return make_float2(__uint_as_float(both << 16), __uint_as_float(both & 0xffff0000u));
#else
    return __half22float2(*reinterpret_cast<const __half2*>(&both));
#endif
}
