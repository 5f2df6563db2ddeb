// Hopper GEMM with 4-bit weights (wgmma): a transposed output tile is 16 BLOCKS weight rows x COLS rows of x, 64 weight
// rows per warpgroup. Threads unpack weights into wgmma's register operand, scaled and rounded to T. One more warp
// fetches 128 elements of K per stage.
//
// Build macros: BLOCKS (up to 16), COLS (32, 64, 96, 128, 192, 256), STAGES, AHEAD (as in small_m.cuh), SPLIT (1, 2, 4
// blocks of a cluster split K), SHARED_BYTES, OUT_FLOAT, those of int4.cuh.
#pragma once

#include "common/int4.cuh"
#include "common/wgmma_registers.cuh"
#include "linear/warpgroup_tile.cuh"

constexpr int WARPGROUPS = (BLOCKS + 3) / 4;
constexpr int CONSUMERS = WARPGROUP_SIZE * WARPGROUPS;
constexpr int THREADS = CONSUMERS + WARPGROUP_SIZE;  // the last gives up registers; one of its warps fetches
constexpr int PRODUCER_REGISTERS = 40;
constexpr int CONSUMER_REGISTERS = WARPGROUPS <= 2 ? 232 : WARPGROUPS == 3 ? 152 : 104;
constexpr int BOX_BYTES = COLS * 128;  // 64 elements of K
constexpr int X_BYTES = 2 * BOX_BYTES;
constexpr int STAGE_BYTES = X_BYTES + BLOCKS * SPAN_BYTES;
constexpr int SCALES_BYTES = GROUPS * BLOCKS * SCALE_BYTES;                   // per stage
constexpr int PARAMETER_BYTES = SCALES_BYTES + GROUPS * BLOCKS * ZERO_BYTES;  // per stage
constexpr int OWN_CHUNKS = CHUNKS / SPLIT;
constexpr int SENT_BYTES = (SPLIT - 1) * CONSUMERS * OWN_CHUNKS * 16;
static_assert(AHEAD <= STAGES, "AHEAD stages fit in the ring");
static_assert(BLOCKS <= 16 && CHUNKS % SPLIT == 0, "as registers allow; a block sums whole chunks");
static_assert(SENT_BYTES <= STAGES * STAGE_BYTES, "what is sent fits in the ring");
static_assert(SHARED_BYTES == 1024 + STAGES * (STAGE_BYTES + PARAMETER_BYTES + 16) + 16, "the launcher's memory is not this");

// x and weights (later the other blocks' sums); scales and zero points; barriers (full, empty, one for the sums).
struct Shared {
    u32 base;

    __device__ __forceinline__ u32 x(u32 iteration) const { return base + iteration % STAGES * STAGE_BYTES; }
    __device__ __forceinline__ u32 weights(u32 iteration) const { return x(iteration) + X_BYTES; }
    __device__ __forceinline__ u32 scales(u32 iteration) const {
        return base + STAGES * STAGE_BYTES + iteration % STAGES * PARAMETER_BYTES;
    }
    __device__ __forceinline__ u32 zeros(u32 iteration) const { return scales(iteration) + SCALES_BYTES; }
    __device__ __forceinline__ u32 barrier(int i) const {
        return base + STAGES * (STAGE_BYTES + PARAMETER_BYTES) + 8 * i;
    }
    __device__ __forceinline__ u32 full(u32 iteration) const { return barrier(iteration % STAGES); }
    __device__ __forceinline__ u32 empty(u32 iteration) const { return barrier(STAGES + iteration % STAGES); }
    __device__ __forceinline__ u32 all_sent() const { return barrier(2 * STAGES); }
    __device__ __forceinline__ u32 parity(u32 iteration) const { return iteration / STAGES % 2; }
};

// A block's split of K, tile after tile. Tiles of the same weights are adjacent, to be in flight at once.
struct BlockWork {
    int split, first_tile, num_tiles, first_span, num_spans, num_blocks, col_tiles;

    __device__ __forceinline__ BlockWork(int n_size, int k_size, int num_rows = COLS) {
        const int spans = k_size / SPAN, step = gridDim.x / SPLIT;
        num_blocks = n_size / BLOCK_ROWS;
        col_tiles = (num_rows + COLS - 1) / COLS;
        split = blockIdx.x % SPLIT;
        first_tile = blockIdx.x / SPLIT;
        num_tiles = ((num_blocks + BLOCKS - 1) / BLOCKS * col_tiles - first_tile + step - 1) / step;
        first_span = spans * split / SPLIT;
        num_spans = spans * (split + 1) / SPLIT - first_span;
    }
};

// A tile's first 16-row weight block and first row of x.
struct TilePlace {
    int first_block, first_col;

    __device__ __forceinline__ TilePlace(const BlockWork& work, int tile) {
        const int at = work.first_tile + tile * (gridDim.x / SPLIT), row_tile = at / work.col_tiles;
        first_block = row_tile * BLOCKS;
        first_col = (at - row_tile * work.col_tiles) * COLS;
    }
};

__device__ __forceinline__ u32 load_word(u32 address) {
    u32 word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
    return word;
}

__device__ __forceinline__ u16 load_half_word(u32 address) {
    u16 word;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(word) : "r"(address) : "memory");
    return word;
}

__device__ __forceinline__ void load_words(u32 (&words)[4], u32 address) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
}

// Scales of rows g and g + 8 in T, each duplicated.
__device__ __forceinline__ void pair_scales(u32& near, u32& far, u32 both) {
    if (SCALE_BF16 != (QUIRE_DTYPE == 2)) {
        const float2 scales = widen_scales(both);
        both = pack_pair(scales.x, scales.y);
    }
    near = __byte_perm(both, 0, 0x1010);
    far = __byte_perm(both, 0, 0x3232);
}

// A group's scales and zero points for a warp's rows.
struct GroupParameters {
    u32 near, far;
    Zeros zeros;

    __device__ __forceinline__ GroupParameters(const Shared& shared, u32 iteration, int block, int group) {
        const int row = (group * BLOCKS + block) * BLOCK_ROWS, g = threadIdx.x % WARP_SIZE / 4;
        pair_scales(near, far, load_word(shared.scales(iteration) + row * 2 + g * 4));
        if (ZEROS) zeros = Zeros(load_half_word(shared.zeros(iteration) + row + g * 2));
    }
    __device__ __forceinline__ void unpack_scaled(u32 (&a)[4], u32 word) const {
        unpack(a, word, zeros);
        a[0] = multiply_pair(a[0], near);
        a[1] = multiply_pair(a[1], far);
        a[2] = multiply_pair(a[2], near);
        a[3] = multiply_pair(a[3], far);
    }
};

// Unpacks 16 columns while tensor cores multiply the previous ones: issued together, products of all warpgroups would
// wait for each other, then all unpack.
__device__ __forceinline__ void sum_tile(Sums& sum, const Shared& shared, const BlockWork& work, u32 iteration) {
    const bool arrives = threadIdx.x % WARP_SIZE == 0;
    const int block = min(static_cast<int>(threadIdx.x) / WARP_SIZE, BLOCKS - 1);
    Fragments a = {};  // of the latest four steps
    clear(sum);
    for (int n = 0; n < work.num_spans; ++n, ++iteration) {
        wait_for(shared.full(iteration), shared.parity(iteration));
        u32 words[2][4];
        const u32 from = shared.weights(iteration) + block * SPAN_BYTES + threadIdx.x % WARP_SIZE * 16;
        load_words(words[0], from);
        load_words(words[1], from + TILE_BYTES);
        const u64 x = operand(shared.x(iteration), 0);
        const u32 x_low = static_cast<u32>(x);
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            const GroupParameters parameters(shared, iteration, block, group);
#pragma unroll
            for (int step = group * GROUP_STEPS; step < (group + 1) * GROUP_STEPS; ++step) {
                parameters.unpack_scaled(a[step % 4], words[step / 4][step % 4]);
                begin_products();
                const u32 low = x_low + (step / 4 * BOX_BYTES + step % 4 * 32) / 16;
                multiply_add(sum, a[step % 4], (x & ~0xffffffffull) | low);
                commit_products();
                wait_for_products<2>(sum);
                hold(a[(step + 2) % 4]);
                if (step == 1 && n > 0 && arrives) arrive(shared.empty(iteration - 1));
            }
        }
    }
    wait_for_products<0>(sum);
    hold(a);
    if (work.num_spans > 0 && arrives) arrive(shared.empty(iteration - 1));
}

// A warp's output rows; bias of this thread's two.
struct OutputTile {
    Out* out;
    int first;  // of this warp's 16 weight rows
    int num_rows, n_size;
    bool is_inside;
    float bias[2];

    __device__ __forceinline__ OutputTile(Out* out, const T* add, int first_block, int num_rows, int n_size)
        : out(out), num_rows(num_rows), n_size(n_size) {
        const int block = threadIdx.x / WARP_SIZE;
        first = (first_block + block) * BLOCK_ROWS;
        is_inside = block < BLOCKS && first < n_size;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = first + 8 * half + threadIdx.x % WARP_SIZE / 4;
            bias[half] = add != nullptr && is_inside ? to_float(add[row]) : 0.0f;
        }
    }

    // Stores rows 8 chunk .. 8 chunk + 7 of x; transposed if 16 bits: lane t has elements 4t .. 4t + 3.
    __device__ __forceinline__ void store(int chunk, const float (&four)[4]) const {
        const int lane = threadIdx.x % WARP_SIZE, g = lane / 4, t = lane % 4;
        if (!is_inside) return;
#if OUT_FLOAT
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int m = 8 * chunk + 2 * t + i % 2, n = first + g + i / 2 * 8;
            if (m < num_rows) out[static_cast<i64>(m) * n_size + n] = four[i] + bias[i / 2];
        }
#else
        const u32 near = transpose_matrix(pack_pair(four[0] + bias[0], four[1] + bias[0]));
        const u32 far = transpose_matrix(pack_pair(four[2] + bias[1], four[3] + bias[1]));
        const int from = lane / 4 * 4 + t % 2 * 2;
        const u32 low[2] = {__shfl_sync(FULL_WARP, near, from), __shfl_sync(FULL_WARP, near, from + 1)};
        const u32 high[2] = {__shfl_sync(FULL_WARP, far, from), __shfl_sync(FULL_WARP, far, from + 1)};
        const int m = 8 * chunk + g;
        if (m < num_rows)
            *reinterpret_cast<uint2*>(out + static_cast<i64>(m) * n_size + first + 4 * t) =
                t < 2 ? make_uint2(low[0], low[1]) : make_uint2(high[0], high[1]);
#endif
    }
};
