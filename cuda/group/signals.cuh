// Memory shared by ranks, and waits for peers, all with a timeout.
//
// Each rank's memory, zero at start, as in model/ops/gpu/group/shared.py: u32 error [32], barriers [MAX_BLOCKS], pushes
// [MAX_BLOCKS], signals [NUM_RANKS][MAX_BLOCKS]; slots [2][NUM_RANKS][MAX_PUSH_ROWS][2 * PUSH_ROW_BYTES] bytes. Numbers
// grow with every launch. Ranks launch the same kernels with the same grids of at most MAX_BLOCKS resident blocks;
// block b meets block b of its peers.
#pragma once

#include "common/types.cuh"

#ifndef NUM_RANKS
#error "define NUM_RANKS: 2, 4 or 8"
#endif

using u8 = unsigned char;

constexpr u64 LIMIT_NS = 4000000000ull;
constexpr int MAX_BLOCKS = 512;
constexpr int MAX_PUSH_ROWS = 16;
constexpr int PUSH_ROW_BYTES = 32 << 10;
constexpr int POLLS = 16;  // between two checks of clock and error

constexpr int BARRIERS = 32, PUSHES = BARRIERS + MAX_BLOCKS, SIGNALS = PUSHES + MAX_BLOCKS;
constexpr int SLOTS = SIGNALS + NUM_RANKS * MAX_BLOCKS;

template <typename Element>
struct PerRank {
    Element* at[NUM_RANKS];
};

struct Group {
    PerRank<u32> words;
    int rank;
    int padding;

    __device__ __forceinline__ u32* own(int word) const { return words.at[rank] + word; }
};

__device__ __forceinline__ void store_release(u32* to, u32 value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" : : "l"(to), "r"(value) : "memory");
}

__device__ __forceinline__ void store_relaxed(u32* to, u32 value) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" : : "l"(to), "r"(value) : "memory");
}

__device__ __forceinline__ u32 load_acquire(const u32* from) {
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

__device__ __forceinline__ u32 load_relaxed(const u32* from) {
    u32 value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

__device__ __forceinline__ u64 now_ns() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now) : : "memory");
    return now;
}

// Bypasses this rank's caches.
__device__ __forceinline__ uint4 load_from_rank(const void* from) {
    uint4 value;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(from)
                 : "memory");
    return value;
}

__device__ __forceinline__ void store_to_rank(void* to, uint4 value) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(to), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
                 : "memory");
}

__device__ __forceinline__ Vec<T> load_rank_vec(const T* from) {
    const uint4 bits = load_from_rank(from);
    return *reinterpret_cast<const Vec<T>*>(&bits);
}

template <typename Element>
__device__ __forceinline__ Element load_rank_element(const Element* from) {
    if constexpr (sizeof(Element) == 2) {  // structs without volatile copies
        const unsigned short bits = *reinterpret_cast<const volatile unsigned short*>(from);
        return *reinterpret_cast<const Element*>(&bits);
    } else {
        return *const_cast<const volatile Element*>(from);
    }
}

// Polls until true; returns false after LIMIT_NS, reporting `peer` to all ranks, or once the group has an error.
template <typename Poll>
__device__ __forceinline__ bool wait_for_rank(const Group& group, int peer, Poll poll) {
    const u64 start = now_ns();
    while (true) {
#pragma unroll 1
        for (int n = 0; n < POLLS; n++)
            if (poll()) return true;
        if (load_relaxed(group.own(0)) != 0) return false;
        if (now_ns() - start > LIMIT_NS) {
#pragma unroll 1
            for (int r = 0; r < NUM_RANKS; r++) store_relaxed(group.words.at[r], 1 + peer);
            return false;
        }
    }
}

struct Barrier {
    const Group& group;
    u32 number;  // of the last barrier

    __device__ __forceinline__ explicit Barrier(const Group& group)
        : group(group), number(*group.own(BARRIERS + blockIdx.x)) {}

    // A peer that sees the signal sees this block's earlier reads and writes completed.
    __device__ __forceinline__ void arrive() {
        number++;
        __syncthreads();
        const int peer = threadIdx.x;
        if (peer < NUM_RANKS && peer != group.rank)
            store_release(group.words.at[peer] + SIGNALS + group.rank * MAX_BLOCKS + blockIdx.x, number);
    }

    // Returns whether all peers arrived.
    __device__ __forceinline__ bool wait() {
        const int peer = threadIdx.x;
        bool came = true;
        if (peer < NUM_RANKS && peer != group.rank) {
            const u32* signal = group.own(SIGNALS + peer * MAX_BLOCKS + blockIdx.x);
            const u32 wanted = number;
            came = wait_for_rank(group, peer, [=]() { return static_cast<int>(load_acquire(signal) - wanted) >= 0; });
        }
        return __syncthreads_and(came);
    }

    __device__ __forceinline__ bool meet() {
        arrive();
        return wait();
    }

    __device__ __forceinline__ void close() {
        if (threadIdx.x == 0) *group.own(BARRIERS + blockIdx.x) = number;
    }
};
