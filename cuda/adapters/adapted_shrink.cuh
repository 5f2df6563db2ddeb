// x times A of the rows' adapters, by the helpers of adapted_product_sm90, which fetch their first pieces of A before x
// exists. Included by that kernel alone.
#pragma once

#include "adapters/adapted_batch.cuh"

constexpr int SHRINK_TILES = 3;  // of 16 outputs, of a unit at most
constexpr int PARTIAL_STRIDE = 16 * SHRINK_TILES + 4;
constexpr int PARTIAL = 8 * PARTIAL_STRIDE;
constexpr int SUMS = 8;  // of a unit's inputs, in any build: a row has one order of sums
constexpr int OWN_SUMS = SUMS / HELPERS;
constexpr int BATCH = 2;  // chunks whose inputs are loaded at once
static_assert(BATCH % OWN_SUMS == 0, "a batch begins with the first sums");
static_assert(4 * OWN_SUMS * PARTIAL <= RING_BYTES, "a helper's sums fit in its ring");

// Some outputs of a group's adapter, over one split of K.
struct ShrinkUnit {
    Group group;
    int split, output, begin, num_chunks;  // chunks of 64 inputs: from `begin`, every HELPERS-th is this helper's

    __device__ __forceinline__ ShrinkUnit(const Adapters& adapters, int number, int num_splits, int num_passes,
                                          int width, int k_size, int helper)
        : group{adapters.groups[number / (num_splits * num_passes)]} {
        const int chunks = (k_size + 63) / 64;
        split = number % num_splits;
        output = number / num_splits % num_passes * width;
        begin = chunks * split / num_splits + helper;
        const int end = chunks * (split + 1) / num_splits;
        num_chunks = max(0, (end - begin + HELPERS - 1) / HELPERS);
    }
};

// A helper's pieces of A: 64 inputs of a unit's outputs.
struct APieces {
    const Adapters& adapters;
    const TensorMap& map;
    int helper, width, num_outputs, num_pieces;  // outputs of a unit, of an adapter; pieces of the ring
    u32 num_taken;                               // of earlier units

    __device__ __forceinline__ APieces(const Adapters& adapters, const TensorMap& map, int helper, int width,
                                       int num_outputs)
        : adapters(adapters), map(map), helper(helper), width(width), num_outputs(num_outputs), num_taken(0) {
        num_pieces = min(MAX_PIECES, RING_BYTES / (width * 128));
    }
    __device__ __forceinline__ u32 full(int chunk) const {
        return adapters.a_full(helper, (num_taken + chunk) % num_pieces);
    }
    __device__ __forceinline__ u32 parity(int chunk) const { return (num_taken + chunk) / num_pieces % 2; }
    __device__ __forceinline__ u32 address(int chunk) const {
        return adapters.rings + helper * RING_BYTES + (num_taken + chunk) % num_pieces * width * 128;
    }
    __device__ __forceinline__ int first_output(const ShrinkUnit& unit) const {
        return unit.group.slot() * num_outputs + unit.output;
    }
    // By one lane.
    __device__ __forceinline__ void fetch(const ShrinkUnit& unit, int chunk) const {
        arrive_expecting(full(chunk), width * 128);
        copy_box(address(chunk), map, (unit.begin + chunk * HELPERS) * 64, first_output(unit), full(chunk));
    }
    __device__ __forceinline__ void fetch_first(const ShrinkUnit& unit) const {
        for (int chunk = 0; chunk < min(num_pieces, unit.num_chunks); ++chunk) fetch(unit, chunk);
    }
};

// A warp's sums of a unit, to its ring once A has been read: [OWN_SUMS][row][PARTIAL_STRIDE]. `from`: this lane's row.
__device__ __forceinline__ void sum_unit(float* partial, APieces& a, const ShrinkUnit& unit,
                                         const T* from, int k_size) {
    const int lane = threadIdx.x % WARP_SIZE, g = lane / 4, t = lane % 4;
    const bool is_row = g < unit.group.num_rows();
    float sums[OWN_SUMS][SHRINK_TILES][4] = {};
    for (int base = 0; base < unit.num_chunks; base += BATCH) {
        u32 inputs[BATCH][8];
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
            const int k = (unit.begin + (base + j) * HELPERS) * 64 + 2 * t;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const bool wanted = is_row && base + j < unit.num_chunks && k + 8 * i < k_size;
                inputs[j][i] = wanted ? *reinterpret_cast<const u32*>(from + k + 8 * i) : 0;
            }
        }
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
            const int chunk = base + j, row = lane % 16;
            if (chunk >= unit.num_chunks) break;
            wait_for(a.full(chunk), a.parity(chunk));
#pragma unroll
            for (int tile = 0; tile < SHRINK_TILES; ++tile) {
                if (16 * tile >= a.width) break;
#pragma unroll
                for (int q = 0; q < 4; ++q) {
                    const u32 vec = (2 * q + lane / 16) ^ (row % 8);  // the 128-byte swizzle
                    u32 weights[4];
                    load_matrices(weights, a.address(chunk) + (16 * tile + row) * 128 + vec * 16);
                    mma_16x8x16(sums[j % OWN_SUMS][tile], weights, inputs[j][2 * q], inputs[j][2 * q + 1]);
                }
            }
            __syncwarp();
            if (lane == 0 && chunk + a.num_pieces < unit.num_chunks) a.fetch(unit, chunk + a.num_pieces);
        }
    }
    a.num_taken += unit.num_chunks;
    __syncwarp();
#pragma unroll
    for (int own = 0; own < OWN_SUMS; ++own) {
#pragma unroll
        for (int tile = 0; tile < SHRINK_TILES; ++tile) {
            if (16 * tile >= a.width) break;
#pragma unroll
            for (int c = 0; c < 4; ++c)
                partial[own * PARTIAL + (2 * t + c % 2) * PARTIAL_STRIDE + 16 * tile + g + c / 2 * 8] =
                    sums[own][tile][c];
        }
    }
}

// The helpers' sums in their order, to memory.
__device__ __forceinline__ void store_unit(const Adapters& adapters, const APieces& a, const ShrinkUnit& unit,
                                           float* shrunk, int num_sorted, int thread) {
    const float* partial = reinterpret_cast<const float*>(adapters.ring_memory);
    float* to = shrunk + (static_cast<i64>(unit.split) * num_sorted + unit.group.first()) * a.num_outputs + unit.output;
    for (int task = thread; task < unit.group.num_rows() * a.width; task += HELPER_THREADS) {
        const int row = task / a.width, r = task % a.width;
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < SUMS; ++n)
            sum += partial[n % HELPERS * (RING_BYTES / 4) + n / HELPERS * PARTIAL + row * PARTIAL_STRIDE + r];
        to[static_cast<i64>(row) * a.num_outputs + r] = sum;
    }
}

// After the helpers have met: their stores are visible to blocks that have waited for them.
__device__ __forceinline__ void add_done(u32* done, u32 num_units) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" : : "l"(done), "r"(num_units) : "memory");
}

__device__ __forceinline__ void wait_for_all(const u32* done, u32 num_units) {
    u32 seen;
    do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(done) : "memory");
    } while (seen != num_units);
}

// By each block after its wait; the last clears done[0], and done[1], the blocks.
__device__ __forceinline__ void leave(u32* done) {
    u32 count;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(count) : "l"(done + 1) : "memory");
    if (count + 1 == gridDim.x) done[0] = done[1] = 0;
}
