// The product of gemv and experts_gemv: x and weights of one 16-bit type.
#pragma once

#include "linear/gemv.cuh"

struct Product {
    const T* bias;

    using Operand = uint4;

    __device__ __forceinline__ void begin_span(int, int) {}
    __device__ __forceinline__ void end_span(GemvSums&) {}
    __device__ __forceinline__ void widen(uint4& to, uint4 from) const { to = from; }
    __device__ __forceinline__ void widen_x(uint4& to, const uint4 (&from)[1]) const { to = from[0]; }

    __device__ __forceinline__ void multiply(GemvSums& sum, int i, int j, uint4 low, uint4 high, uint4 x) const {
        mma_16x8x32(sum[i][j], low, high, x);
    }
    __device__ __forceinline__ float start(int n) const { return bias == nullptr ? 0.0f : to_float(bias[n]); }
    __device__ __forceinline__ float finish(float total, int, int) const { return total; }
};
