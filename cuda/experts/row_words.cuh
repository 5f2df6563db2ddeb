// Rows that blocks of one launch exchange in global memory. A word holds 32 bits of data and the launch number, so it
// is its own flag: one round trip through L2, where a barrier of all blocks takes three.
#pragma once

#include "common/types.cuh"

constexpr u32 MAX_POLLS = 1 << 26;  // half a minute: then the launch fails, and another worker takes the requests

__device__ __forceinline__ void publish(u64* to, u32 data, u32 launch) {
    const u64 word = static_cast<u64>(launch) << 32 | data;
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" : : "l"(to), "l"(word) : "memory");
}

// Publishes elements of two neighbouring lanes: the first passes `to`, both the same `exists`. Called by a whole warp.
__device__ __forceinline__ void publish_pair(u64* to, T own, bool exists, u32 launch) {
    const u32 bits = *reinterpret_cast<const unsigned short*>(&own);
    const u32 next = __shfl_down_sync(FULL_WARP, bits, 1);
    if (exists && threadIdx.x % 2 == 0) publish(to, next << 16 | bits, launch);
}

__device__ __forceinline__ u32 receive(const u64* from, u32 launch) {
#pragma unroll 1
    for (u32 polls = 0;; ++polls) {
        u64 word;
        asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
        if (word >> 32 == launch) return static_cast<u32>(word);
        if (polls == MAX_POLLS) __trap();
    }
}

// Four elements of T in two words, `from` aligned to 16 bytes.
__device__ __forceinline__ uint2 receive_four(const u64* from, u32 launch) {
#pragma unroll 1
    for (u32 polls = 0;; ++polls) {
        u64 a, b;
        asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(from) : "memory");
        if (a >> 32 == launch && b >> 32 == launch) return make_uint2(static_cast<u32>(a), static_cast<u32>(b));
        if (polls == MAX_POLLS) __trap();
    }
}
