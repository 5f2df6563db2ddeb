// Sums over the ranks' parts, in rank order in float, rounded to T once.
#pragma once

#include "group/signals.cuh"

__device__ __forceinline__ Vec<T> sum_of_ranks(const Vec<T> (&parts)[NUM_RANKS]) {
    Vec<T> sum;
#pragma unroll
    for (int j = 0; j < Vec<T>::SIZE; j++) {
        float x = to_float(parts[0].at[j]);
#pragma unroll
        for (int r = 1; r < NUM_RANKS; r++) x += to_float(parts[r].at[j]);
        sum.at[j] = from_float<T>(x);
    }
    return sum;
}

__device__ __forceinline__ Vec<T> load_sum_vec(const PerRank<const T>& parts, i64 i) {
    Vec<T> each[NUM_RANKS];
#pragma unroll
    for (int r = 0; r < NUM_RANKS; r++) each[r] = load_rank_vec(parts.at[r] + i);
    return sum_of_ranks(each);
}

__device__ __forceinline__ T load_sum(const PerRank<const T>& parts, i64 i) {
    float x = to_float(load_rank_element(parts.at[0] + i));
#pragma unroll
    for (int r = 1; r < NUM_RANKS; r++) x += to_float(load_rank_element(parts.at[r] + i));
    return from_float<T>(x);
}
