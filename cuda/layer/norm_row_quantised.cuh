// norm_row, rounded to T, then to e4m3.
#pragma once

#include "common/fp8.cuh"

// Arguments as in norm_row.
template <typename MakeVec, typename MakeOne>
__device__ __forceinline__ void norm_row_quantised(MakeVec make_vec, MakeOne make_one, const T* made, const T* weight,
                                                   u8* out, float* scale, int width, float eps, bool aligned) {
    float sum = 0.0f;
    if (aligned && fits_in_registers(width)) {
        Vec<T> held[HELD_VECS];
        for_each_vec(held, width, [&](Vec<T>& vec, int i) { vec = make_vec(i); });
        for_each_vec(held, width, [&](Vec<T>& vec, int) {
#pragma unroll
            for (int j = 0; j < Vec<T>::SIZE; j++) sum += to_float(vec.at[j]) * to_float(vec.at[j]);
        });
        const float by = 1.0f / sqrtf(block_sum(sum) / width + eps);
        for_each_vec(held, width, [&](Vec<T>& vec, int i) {
            const Vec<T> weights = load_vec(weight + i);
#pragma unroll
            for (int j = 0; j < Vec<T>::SIZE; j++)
                vec.at[j] = from_float<T>(to_float(vec.at[j]) * by * to_float(weights.at[j]));
        });
        quantise_held(held, width, out, scale);
        return;
    }
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        const float x = to_float(make_one(i));
        sum += x * x;
    }
    const float by = 1.0f / sqrtf(block_sum(sum) / width + eps);
    const auto normed = [=](int i) { return from_float<T>(to_float(made[i]) * by * to_float(weight[i])); };
    quantise_elements(normed, width, out, scale);
}
