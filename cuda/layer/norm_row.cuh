// RMSNorm of a row held in registers by one block.
#pragma once

#include "common/types.cuh"

// Vectors per thread; rows of more than HELD * blockDim.x are read twice.
constexpr int HELD = 4;

// out[i] = row[i] / sqrt(mean(row^2) + eps) * weight[i], for i < width.
//   make_vec(i), make_one(i)  elements i.., each called once, before `out` is written
//   made                      where the row is readable afterwards
//   aligned                   rows, weight and out allow 16-byte accesses
template <typename MakeVec, typename MakeOne>
__device__ __forceinline__ void norm_row(MakeVec make_vec, MakeOne make_one, const T* made, const T* weight, T* out,
                                         int width, float eps, bool aligned) {
    constexpr int SIZE = Vec<T>::SIZE;
    const int stride = blockDim.x * SIZE;
    float sum = 0.0f;

    if (aligned && width <= HELD * stride) {
        Vec<T> held[HELD];
#pragma unroll
        for (int n = 0; n < HELD; n++) {
            const int i = threadIdx.x * SIZE + n * stride;
            if (i < width) held[n] = make_vec(i);
        }
#pragma unroll
        for (int n = 0; n < HELD; n++) {
            if (threadIdx.x * SIZE + n * stride >= width) break;
#pragma unroll
            for (int j = 0; j < SIZE; j++) sum += to_float(held[n].at[j]) * to_float(held[n].at[j]);
        }
        const float scale = 1.0f / sqrtf(block_sum(sum) / width + eps);
#pragma unroll
        for (int n = 0; n < HELD; n++) {
            const int i = threadIdx.x * SIZE + n * stride;
            if (i >= width) break;
            const Vec<T> by = load_vec(weight + i);
            Vec<T> normed;
#pragma unroll
            for (int j = 0; j < SIZE; j++)
                normed.at[j] = from_float<T>(to_float(held[n].at[j]) * scale * to_float(by.at[j]));
            store_vec(out + i, normed);
        }
        return;
    }

    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        const float x = to_float(make_one(i));
        sum += x * x;
    }
    const float scale = 1.0f / sqrtf(block_sum(sum) / width + eps);
    for (int i = threadIdx.x; i < width; i += blockDim.x)
        out[i] = from_float<T>(to_float(made[i]) * scale * to_float(weight[i]));
}
