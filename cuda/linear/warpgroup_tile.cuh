// wgmma accumulators of a warpgroup: 64 weight rows x COLS rows of x.
#pragma once

#include "common/product_types.cuh"
#include "common/wgmma.cuh"

constexpr int CHUNKS = COLS / 8;  // of 8 rows of x: four sums per thread

using Sums = float[COLS / 2];

__device__ __forceinline__ void clear(Sums& sum) {
#pragma unroll
    for (int i = 0; i < COLS / 2; ++i) sum[i] = 0.0f;
}

template <typename OutputTile>
__device__ __forceinline__ void store_all(const Sums& sum, const OutputTile& output) {
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        const float four[4] = {sum[4 * chunk], sum[4 * chunk + 1], sum[4 * chunk + 2], sum[4 * chunk + 3]};
        output.store(chunk, four);
    }
}

// Makes a ring's mbarriers: full (arrival of TMA), empty (arrivals of consumer warps).
template <typename Shared>
__device__ __forceinline__ void make_ring_barriers(const Shared& shared, int consumer_warps) {
    for (int stage = 0; stage < STAGES; ++stage) {
        make_barrier(shared.full(stage), 1);
        make_barrier(shared.empty(stage), consumer_warps);
    }
}
