// Philox4x32-10 (Salmon et al., SC 2011), as in model/ops/cpu/philox.py.
#pragma once

#include "common/types.cuh"

struct PhiloxWords {
    u32 at[4];
};

// Counter (c0, c1, c2, 0), key (seed low, seed high).
__device__ __forceinline__ PhiloxWords philox_words(u32 c0, u32 c1, u32 c2, u64 seed) {
    PhiloxWords words = {{c0, c1, c2, 0}};
    u32 key0 = static_cast<u32>(seed), key1 = static_cast<u32>(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const u32 high0 = __umulhi(words.at[0], 0xD2511F53u), low0 = words.at[0] * 0xD2511F53u;
        const u32 high1 = __umulhi(words.at[2], 0xCD9E8D57u), low1 = words.at[2] * 0xCD9E8D57u;
        words = {{high1 ^ words.at[1] ^ key0, low1, high0 ^ words.at[3] ^ key1, low0}};
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return words;
}

// Uniform in (0, 1), exact in float.
__device__ __forceinline__ float uniform(u32 word) { return (static_cast<float>(word >> 9) + 0.5f) * 0x1p-23f; }

// Standard Gumbel noise, bit-identical to the reference.
__device__ __noinline__ float gumbel_exact(u32 word) {
    return static_cast<float>(-log(-log(static_cast<double>(uniform(word)))));
}

// Gumbel noise within 2e-6, without double precision.
__device__ __forceinline__ float gumbel_fast(u32 word) { return -__logf(-logf(uniform(word))); }

constexpr float GUMBEL_LOWEST = -2.82f;  // -log(-log(2^-24)) = -2.812
constexpr float GUMBEL_HIGHEST = 16.64f;  // -log(-log(1 - 2^-24)) = 16.636
