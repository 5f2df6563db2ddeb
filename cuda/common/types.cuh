// The element type `T` of a build (QUIRE_DTYPE), vectors, conversions, reductions. NVRTC has no standard headers.
#pragma once

#if __CUDA_ARCH__ >= 900
#include "common/half.cuh"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

#ifndef QUIRE_DTYPE
#error "define QUIRE_DTYPE: 0 float32, 1 float16, 2 bfloat16"
#endif

#if QUIRE_DTYPE == 0
using T = float;
#elif QUIRE_DTYPE == 1
using T = __half;
#elif QUIRE_DTYPE == 2
using T = __nv_bfloat16;
#else
#error "QUIRE_DTYPE is 0, 1 or 2"
#endif

using i64 = long long;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr int WARP_SIZE = 32;
constexpr u32 FULL_WARP = 0xffffffffu;

template <typename Element>
struct alignas(16) Vec {
    static constexpr int SIZE = 16 / sizeof(Element);
    Element at[SIZE];
};

template <typename Element>
__device__ __forceinline__ Vec<Element> load_vec(const Element* from) {
    return *reinterpret_cast<const Vec<Element>*>(from);
}

template <typename Element>
__device__ __forceinline__ void store_vec(Element* to, const Vec<Element>& vec) {
    *reinterpret_cast<Vec<Element>*>(to) = vec;
}

__device__ __forceinline__ bool is_aligned_16(const void* address) {
    return reinterpret_cast<u64>(address) % 16 == 0;
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename Element>
__device__ __forceinline__ Element from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) { return x; }
template <>
__device__ __forceinline__ __half from_float<__half>(float x) { return __float2half_rn(x); }
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

__device__ __forceinline__ float positive_infinity() { return __int_as_float(0x7f800000); }

// Called by a full warp; every lane gets the result.
template <typename Value>
__device__ __forceinline__ Value warp_sum(Value value) {
#pragma unroll
    for (int offset = WARP_SIZE / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(FULL_WARP, value, offset);
    return value;
}

template <typename Value>
__device__ __forceinline__ Value warp_max(Value value) {
#pragma unroll
    for (int offset = WARP_SIZE / 2; offset > 0; offset /= 2) {
        const Value other = __shfl_xor_sync(FULL_WARP, value, offset);
        value = other > value ? other : value;
    }
    return value;
}

// Called by a one-dimensional block of whole warps; every thread gets the result.
template <typename Value>
__device__ __forceinline__ Value block_sum(Value value) {
    __shared__ Value partial[WARP_SIZE];
    const int lane = threadIdx.x % WARP_SIZE;
    value = warp_sum(value);
    __syncthreads();  // readers of an earlier call are done
    if (lane == 0) partial[threadIdx.x / WARP_SIZE] = value;
    __syncthreads();
    return warp_sum(lane < blockDim.x / WARP_SIZE ? partial[lane] : Value(0));
}

// `lowest`: the result of no values.
template <typename Value>
__device__ __forceinline__ Value block_max(Value value, Value lowest) {
    __shared__ Value partial[WARP_SIZE];
    const int lane = threadIdx.x % WARP_SIZE;
    value = warp_max(value);
    __syncthreads();
    if (lane == 0) partial[threadIdx.x / WARP_SIZE] = value;
    __syncthreads();
    return warp_max(lane < blockDim.x / WARP_SIZE ? partial[lane] : lowest);
}

// Inclusive prefix sums over the threads, and the total, in order: sums of positive numbers never decrease.
template <typename Value>
__device__ __forceinline__ Value block_scan(Value value, Value* total) {
    __shared__ Value of_warps[WARP_SIZE];
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
#pragma unroll
    for (int offset = 1; offset < WARP_SIZE; offset *= 2) {
        const Value left = __shfl_up_sync(FULL_WARP, value, offset);
        if (lane >= offset) value += left;
    }
    __syncthreads();
    if (lane == WARP_SIZE - 1) of_warps[warp] = value;
    __syncthreads();
    Value before = 0, sum = 0;
    for (int n = 0; n < blockDim.x / WARP_SIZE; n++) {
        if (n == warp) before = sum;
        sum += of_warps[n];
    }
    *total = sum;
    return before + value;
}

// Prefetches `num_bytes` of constants to L2, in the first block of a small grid.
__device__ __forceinline__ void prefetch_for_few_rows(const void* from, int num_bytes) {
    if (gridDim.x <= 16 && blockIdx.x == 0 && threadIdx.x * 128 < num_bytes)
        asm volatile("prefetch.global.L2 [%0];" : : "l"(static_cast<const char*>(from) + threadIdx.x * 128));
}

// Programmatic dependent launch: before this call a kernel may not read what other kernels write, nor write what they
// read. A no-op in a plain launch and before sm_90.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" : : : "memory");
#endif
}

// The next kernel may start once all blocks have called this or ended.
__device__ __forceinline__ void start_next_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
#endif
}
