// RMSNorm fused into a one-row product: every block norms the row while its first weights arrive. The last to read the
// residual stream writes it, after its first tile or at its end.
#pragma once

#include "common/types.cuh"

__device__ u32 num_read;  // blocks that have read the row; atomicInc wraps to 0 for the next launch

struct NormedRow {
    const T* x;
    T* residual;
    const T* norm;
    float eps;
    Vec<T> sum = {};       // the thread's elements of the residual stream
    bool is_last = false;  // valid in thread 0

    __device__ __forceinline__ Vec<T> sum_at(int i) const {
        Vec<T> sum = load_vec(residual + i);
        const Vec<T> more = load_vec(x + i);
#pragma unroll
        for (int j = 0; j < Vec<T>::SIZE; j++) sum.at[j] = from_float<T>(to_float(sum.at[j]) + to_float(more.at[j]));
        return sum;
    }

    static __device__ __forceinline__ int stride(int width) { return width; }
    __device__ __forceinline__ const T* get(float* shared, int width) {
        T* normed = reinterpret_cast<T*>(shared);
        const int i = threadIdx.x * Vec<T>::SIZE;
        Vec<T> by = {}, held = {};
        if (i < width) by = load_vec(norm + i);
        wait_for_previous_kernel();
        if (i < width) held = sum_at(i);
        sum = held;
        float squares = 0.0f;
#pragma unroll
        for (int j = 0; j < Vec<T>::SIZE; j++) squares += to_float(held.at[j]) * to_float(held.at[j]);
        const float scale = 1.0f / sqrtf(block_sum(squares) / width + eps);
        if (threadIdx.x == 0) is_last = atomicInc(&num_read, gridDim.x - 1) == gridDim.x - 1;
#pragma unroll
        for (int j = 0; j < Vec<T>::SIZE; j++)
            held.at[j] = from_float<T>(to_float(held.at[j]) * scale * to_float(by.at[j]));
        if (i < width) store_vec(normed + i, held);
        __syncthreads();
        return normed;
    }

    static __device__ __forceinline__ bool& shared_flag() {
        __shared__ bool flag;
        return flag;
    }

    // Called before the barrier of the block's first tile.
    __device__ __forceinline__ void announce() const {
        if (threadIdx.x == 0) shared_flag() = is_last;
    }

    // Called after that barrier.
    __device__ __forceinline__ void finish_early(int width) const {
        const int i = threadIdx.x * Vec<T>::SIZE;
        if (shared_flag() && i < width) store_vec(residual + i, sum);
    }

    __device__ __forceinline__ void finish(int width) const {
        const int i = threadIdx.x * Vec<T>::SIZE;
        if (__syncthreads_or(is_last) && i < width) store_vec(residual + i, sum_at(i));
    }
};
