// SwiGLU: SiLU(gate) * up.
#pragma once

#include "common/types.cuh"

__device__ __forceinline__ T gated(T gate, T up) {
    const float x = to_float(gate);
    return from_float<T>(x / (1.0f + expf(-x)) * to_float(up));
}

__device__ __forceinline__ Vec<T> gated(const Vec<T>& gate, const Vec<T>& up) {
    Vec<T> product;
#pragma unroll
    for (int j = 0; j < Vec<T>::SIZE; j++) product.at[j] = gated(gate.at[j], up.at[j]);
    return product;
}
