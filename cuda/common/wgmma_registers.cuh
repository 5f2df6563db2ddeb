// wgmma with the first operand in registers, which are read until the products have been waited for.
#pragma once

#include "common/wgmma.cuh"

WGMMA_REGISTERS(multiply_add, 32, "{%16, %17, %18, %19}, %20", "0")
WGMMA_REGISTERS(multiply_add, 64, "{%32, %33, %34, %35}, %36", "0")
WGMMA_REGISTERS(multiply_add, 96, "{%48, %49, %50, %51}, %52", "0")
WGMMA_REGISTERS(multiply_add, 128, "{%64, %65, %66, %67}, %68", "0")
WGMMA_REGISTERS(multiply_add, 192, "{%96, %97, %98, %99}, %100", "0")
WGMMA_REGISTERS(multiply_add, 256, "{%128, %129, %130, %131}, %132", "0")

using Fragments = u32[4][4];  // of a warp's 16 rows and 64 columns

// Keeps registers from being reused before this point.
__device__ __forceinline__ void hold(const u32 (&a)[4]) {
    asm volatile("" : : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]));
}

__device__ __forceinline__ void hold(const Fragments& a) {
#pragma unroll
    for (int s = 0; s < 4; ++s) hold(a[s]);
}

// Starts products with 64 columns of b, in shared memory.
template <int SIZE>
__device__ __forceinline__ void start_products(float (&sum)[SIZE], const Fragments& a, u32 b) {
    begin_products();
#pragma unroll
    for (int s = 0; s < 4; ++s) multiply_add(sum, a[s], operand(b + s * 32, 0));
    commit_products();
}
