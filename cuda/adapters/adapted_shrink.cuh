// LoRA shrink (x @ A) by the helpers of adapted_product_sm90 alone; they fetch their first pieces of A before x exists.
#pragma once

#include "adapters/adapted_batch.cuh"

constexpr int SHRINK_TILES = 3;  // most 16-output tiles of a unit
constexpr int PARTIAL_STRIDE = 16 * SHRINK_TILES + 4;
constexpr int PARTIAL = 8 * PARTIAL_STRIDE;
constexpr int SUMS = 8;  // per unit in every build, so that a row's order of sums is fixed
constexpr int OWN_SUMS = SUMS / HELPERS;
constexpr int BATCH = 2;  // chunks whose inputs are loaded at once
static_assert(BATCH % OWN_SUMS == 0, "a batch begins with the first sums");
static_assert(4 * OWN_SUMS * PARTIAL <= RING_BYTES, "a helper's sums fit in its ring");

// Some outputs of a group's adapter, over one split of K.
struct ShrinkUnit {
    Group group;
    int split, output, begin, num_chunks;  // chunks of 64 inputs; this helper takes every HELPERS-th from `begin`

    __device__ __forceinline__ ShrinkUnit(const Adapters& adapters, u32 number, u32 num_passes, int width, int k_size,
                                          int helper) {
        const u32 rest = number / SPLITS, of_group = num_passes == 1 ? rest : rest / num_passes;
        const u32 chunks = (k_size + 63u) / 64;
        group = {adapters.groups[of_group]};
        split = number % SPLITS;
        output = (rest - of_group * num_passes) * width;
        begin = chunks * split / SPLITS + helper;
        const int end = chunks * (split + 1) / SPLITS;
        num_chunks = static_cast<u32>(max(0, end - begin + HELPERS - 1)) / HELPERS;
    }
};

// A helper's ring of pieces of A: 64 inputs x a unit's outputs.
struct APieces {
    const Adapters& adapters;
    const TensorMap& map;
    int helper, width, num_outputs, num_pieces;  // outputs per unit, per adapter; pieces in the ring
    int next, now;                               // ring pieces to fetch, to multiply by
    u32 parity;

    __device__ __forceinline__ APieces(const Adapters& adapters, const TensorMap& map, int helper, int width,
                                       int num_outputs, int num_pieces)
        : adapters(adapters),
          map(map),
          helper(helper),
          width(width),
          num_outputs(num_outputs),
          num_pieces(num_pieces),
          next(0),
          now(0),
          parity(0) {}
    __device__ __forceinline__ u32 address(int piece) const {
        return adapters.rings + helper * RING_BYTES + piece * width * 128;
    }
    __device__ __forceinline__ void advance() {
        if (++now < num_pieces) return;
        now = 0;
        parity ^= 1;
    }
    // Called by one lane.
    __device__ __forceinline__ void fetch(const ShrinkUnit& unit, int chunk) {
        const u32 full = adapters.a_full(helper, next);
        arrive_expecting(full, width * 128);
        copy_box(address(next), map, (unit.begin + chunk * HELPERS) * 64, unit.group.slot() * num_outputs + unit.output,
                 full);
        if (++next == num_pieces) next = 0;
    }
    __device__ __forceinline__ void fetch_first(const ShrinkUnit& unit) {
#pragma unroll 1
        for (int chunk = 0; chunk < min(num_pieces, unit.num_chunks); ++chunk) fetch(unit, chunk);
    }
};

// Two elements of x; e4m3 widens exactly.
__device__ __forceinline__ u32 load_two(const X* from) {
#if WEIGHT_FP8
    return widen<0>(*reinterpret_cast<const u16*>(from));
#else
    return *reinterpret_cast<const u32*>(from);
#endif
}

// Sums a unit and stores the warp's sums over its ring: [OWN_SUMS][row][PARTIAL_STRIDE]. `from`: this lane's row.
__device__ __forceinline__ void sum_unit(float* partial, APieces& a, const ShrinkUnit& unit,
                                         const X* from, int k_size) {
    const int lane = threadIdx.x % WARP_SIZE, g = lane / 4, t = lane % 4;
    const bool is_row = g < unit.group.num_rows();
    float sums[OWN_SUMS][SHRINK_TILES][4] = {};
#pragma unroll 1
    for (int base = 0; base < unit.num_chunks; base += BATCH) {
        u32 inputs[BATCH][8];
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
            const int k = (unit.begin + (base + j) * HELPERS) * 64 + 2 * t;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const bool wanted = is_row && base + j < unit.num_chunks && k + 8 * i < k_size;
                inputs[j][i] = wanted ? load_two(from + k + 8 * i) : 0;
            }
        }
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
            const int chunk = base + j, row = lane % 16;
            if (chunk >= unit.num_chunks) break;
            wait_for(a.adapters.a_full(a.helper, a.now), a.parity);
            const u32 piece = a.address(a.now);
            a.advance();
#pragma unroll
            for (int tile = 0; tile < SHRINK_TILES; ++tile) {
                if (16 * tile >= a.width) break;
#pragma unroll
                for (int q = 0; q < 4; ++q) {
                    const u32 vec = (2 * q + lane / 16) ^ (row % 8);  // the 128-byte swizzle
                    u32 weights[4];
                    load_matrices(weights, piece + (16 * tile + row) * 128 + vec * 16);
                    mma_16x8x16(sums[j % OWN_SUMS][tile], weights, inputs[j][2 * q], inputs[j][2 * q + 1]);
                }
            }
            __syncwarp();
            if (lane == 0 && chunk + a.num_pieces < unit.num_chunks) a.fetch(unit, chunk + a.num_pieces);
        }
    }
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
    publish_stores();  // before more pieces are fetched there
}

// Adds the helpers' sums in fixed order and stores them.
__device__ __forceinline__ void store_unit(const Adapters& adapters, const APieces& a, const ShrinkUnit& unit,
                                           const Shrunk& shrunk, const float* x_scale, int thread) {
    const float* partial = reinterpret_cast<const float*>(adapters.ring_memory);
    const int row = thread / 16 % 8;
    if (row >= unit.group.num_rows()) return;
    float scale = 1.0f;
    if (WEIGHT_FP8) scale = x_scale[adapters.sorted_rows[unit.group.first() + row]];
    u64* to = shrunk.values + (unit.split * shrunk.num_sorted + unit.group.first() + row) * a.num_outputs + unit.output;
#pragma unroll 1
    for (int r = thread / 128 * 16 + thread % 16; r < a.width; r += HELPER_THREADS / 8) {
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < SUMS; ++n)
            sum += partial[n % HELPERS * (RING_BYTES / 4) + n / HELPERS * PARTIAL + row * PARTIAL_STRIDE + r];
        store_relaxed(to + r, static_cast<u64>(shrunk.tag) << 32 | __float_as_uint(sum * scale));
    }
}

// Called by each block after its waits. The last block advances the tag; before tags wrap around it clears `shrunk`.
__device__ __forceinline__ void leave(u32* left, const Shrunk& shrunk) {
    u32 count;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(count) : "l"(left) : "memory");
    if (count + 1 < gridDim.x) return;
    const bool is_last_tag = shrunk.tag == 0xffffffffu;
    for (int i = 0; is_last_tag && i < ROOM_WORDS; ++i) shrunk.values[i] = 0;
    left[0] = 0;
    left[1] = is_last_tag ? 0 : shrunk.tag;
}
