// Where prefill attention on Hopper keeps what it works on: shared memory between the warp that brings query rows and
// tiles of keys and values, and the warpgroups that use them.
#pragma once

#include "attention/prefill_tiles.cuh"
#include "attention/prefill_work.cuh"
#include "common/types.cuh"
#include "common/wgmma.cuh"

constexpr int STAGES = 2;
constexpr int NUM_CONSUMERS = 3;  // warpgroups
constexpr int WARPGROUP_ROWS = 64;
static_assert(PADDED_ROWS == NUM_CONSUMERS * WARPGROUP_ROWS, "every row has a warpgroup");
constexpr int TAIL_BYTES = 256;  // barriers, the piece of work and the part of it
static_assert(SHARED_BYTES == QUERY_BYTES + 2 * STAGES * TILE_BYTES + TAIL_BYTES, "the launcher's memory is not this");

// Shared memory: query rows, STAGES tiles of keys, as many of values, barriers, the piece of work, the part of it.
struct Shared {
    unsigned char* base;

    __device__ __forceinline__ u32 queries() const { return shared_address(base); }
    __device__ __forceinline__ u32 keys(int stage) const { return queries() + QUERY_BYTES + stage * TILE_BYTES; }
    __device__ __forceinline__ u32 values(int stage) const { return keys(STAGES + stage); }
    __device__ __forceinline__ u32 barrier(int i) const { return keys(2 * STAGES) + 8 * i; }
    __device__ __forceinline__ u32 queries_full() const { return barrier(0); }
    __device__ __forceinline__ u32 queries_empty() const { return barrier(1); }
    __device__ __forceinline__ u32 keys_full(int stage) const { return barrier(2 + stage); }
    __device__ __forceinline__ u32 keys_empty(int stage) const { return barrier(2 + STAGES + stage); }
    __device__ __forceinline__ u32 values_full(int stage) const { return barrier(2 + 2 * STAGES + stage); }
    __device__ __forceinline__ u32 values_empty(int stage) const { return barrier(2 + 3 * STAGES + stage); }
    __device__ __forceinline__ Work* work() const {
        return reinterpret_cast<Work*>(base + QUERY_BYTES + 2 * STAGES * TILE_BYTES + TAIL_BYTES / 2);
    }
    __device__ __forceinline__ Part* part() const { return reinterpret_cast<Part*>(work() + 1); }
};

// How many tiles a side has gone through since the launch: which stage is next, and the parity of its phase.
struct Turn {
    u32 count = 0;

    __device__ __forceinline__ int stage() const { return count % STAGES; }
    __device__ __forceinline__ u32 parity() const { return count / STAGES % 2; }
};
