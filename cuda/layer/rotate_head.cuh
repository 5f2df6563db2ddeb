// RMSNorm and RoPE of one head by TEAM lanes, and its rounding for the cache.
#pragma once

#include "common/fp8.cuh"
#include "common/types.cuh"

#ifndef QUIRE_KV_FP8
#define QUIRE_KV_FP8 0
#endif
#if QUIRE_KV_FP8
using Kv = u8;
#else
using Kv = T;
#endif

constexpr int SIZE = Vec<T>::SIZE;
constexpr int HALF = HEAD_DIM / 2;
constexpr int LANES = HALF / SIZE;
static_assert(HEAD_DIM % (2 * SIZE) == 0 && LANES <= WARP_SIZE, "a warp holds a head in 16-byte vectors");

constexpr int power_of_two(int at_least) {
    int power = 1;
    while (power < at_least) power *= 2;
    return power;
}
constexpr int TEAM = power_of_two(LANES);

// A lane's RoPE angles of a position, from element i on.
struct Angles {
    float cos[SIZE];
    float sin[SIZE];

    // Arguments point to the position's row.
    __device__ __forceinline__ void load(const float* cosines, const float* sines, int i) {
#pragma unroll
        for (int j = 0; j < SIZE; j += Vec<float>::SIZE) {
            const Vec<float> c = load_vec(cosines + i + j), s = load_vec(sines + i + j);
#pragma unroll
            for (int n = 0; n < Vec<float>::SIZE; n++) cos[j + n] = c.at[n], sin[j + n] = s.at[n];
        }
    }
};

// A lane's part of a head: elements i.. and HALF + i.., in float.
struct Pair {
    float low[SIZE];
    float high[SIZE];

    __device__ __forceinline__ void load(const T* head, int i) {
        const Vec<T> a = load_vec(head + i), b = load_vec(head + HALF + i);
#pragma unroll
        for (int j = 0; j < SIZE; j++) {
            low[j] = to_float(a.at[j]);
            high[j] = to_float(b.at[j]);
        }
    }

    __device__ __forceinline__ void store(T* head, int i) const {
        Vec<T> a, b;
#pragma unroll
        for (int j = 0; j < SIZE; j++) {
            a.at[j] = from_float<T>(low[j]);
            b.at[j] = from_float<T>(high[j]);
        }
        store_vec(head + i, a);
        store_vec(head + HALF + i, b);
    }

#if QUIRE_KV_FP8
    // Rounds to T first, like a cache of that type; NaN stays NaN.
    __device__ __forceinline__ void store_fp8(u8* head, int i, float scale) const {
        struct alignas(SIZE) { u16 at[SIZE / 2]; } a, b;
        const auto scaled = [scale](float x) { return to_float(from_float<T>(x)) / scale; };
#pragma unroll
        for (int j = 0; j < SIZE; j += 2) {
            a.at[j / 2] = e4m3_pair(scaled(low[j]), scaled(low[j + 1]));
            b.at[j / 2] = e4m3_pair(scaled(high[j]), scaled(high[j + 1]));
        }
        *reinterpret_cast<decltype(a)*>(head + i) = a;
        *reinterpret_cast<decltype(b)*>(head + HALF + i) = b;
    }
#endif

    __device__ __forceinline__ void normalise(float scale, const Pair& by) {
#pragma unroll
        for (int j = 0; j < SIZE; j++) {
            low[j] *= scale * by.low[j];
            high[j] *= scale * by.high[j];
        }
    }

    __device__ __forceinline__ void rotate(const Angles& by) {
#pragma unroll
        for (int j = 0; j < SIZE; j++) {
            const float x = low[j], y = high[j];
            low[j] = x * by.cos[j] - y * by.sin[j];
            high[j] = y * by.cos[j] + x * by.sin[j];
        }
    }

    // Sum over the head. Called by all lanes of a warp.
    __device__ __forceinline__ float square_sum() const {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < SIZE; j++) sum += low[j] * low[j] + high[j] * high[j];
#pragma unroll
        for (int offset = TEAM / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, offset);
        return sum;
    }
};
