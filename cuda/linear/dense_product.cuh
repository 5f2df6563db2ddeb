// The product of gemv and experts_gemv: rows of x times weights of the same 16-bit type.
#pragma once

#include "linear/gemv.cuh"

struct Product {
    const T* bias;

    using Operand = uint4;

    __device__ __forceinline__ void begin_span(int, int) {}
    __device__ __forceinline__ void end_span(GemvSums&) {}
    __device__ __forceinline__ void widen(uint4& to, uint4 from) const { to = from; }
    __device__ __forceinline__ void widen_x(uint4& to, const uint4 (&from)[1]) const { to = from[0]; }

    // An mma sums over 16 elements of K in any order: where weight and x agree, a lane's fragments can be the 16 bytes
    // that lie together in memory.
    __device__ __forceinline__ void multiply(GemvSums& sum, int i, int j, uint4 low, uint4 high, uint4 x) const {
        const u32 first[4] = {low.x, high.x, low.y, high.y};
        const u32 second[4] = {low.z, high.z, low.w, high.w};
        mma_16x8x16(sum[i][j], first, x.x, x.y);
        mma_16x8x16(sum[i][j], second, x.z, x.w);
    }
    __device__ __forceinline__ float start(int n) const { return bias == nullptr ? 0.0f : to_float(bias[n]); }
    __device__ __forceinline__ float finish(float total, int, int) const { return total; }
};
