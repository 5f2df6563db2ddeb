// Order of router logits.
#pragma once

#include "common/types.cuh"

// Larger for a better logit; 1 for NaN, never 0.
__device__ __forceinline__ u32 rank_of(float logit) {
    const u32 bits = __float_as_uint(logit + 0.0f);  // both zeros tie
    return isnan(logit) ? 1u : bits >> 31 ? ~bits : bits | 0x80000000u;
}
