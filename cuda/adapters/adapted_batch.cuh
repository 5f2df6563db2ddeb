// A batch's adapters in shared memory, for the helpers of adapted_product_sm90: warps other than the product's.
// Included by that kernel alone.
#pragma once

#include "linear/small_m.cuh"

constexpr int HELPERS = 4 * (3 - WARPGROUPS);  // warps
constexpr int HELPER_THREADS = HELPERS * WARP_SIZE;
constexpr int RING_BYTES = RINGS_BYTES / HELPERS;
constexpr int MAX_PIECES = MAX_RING_PIECES;  // of a ring
static_assert(COLS <= 255, "rows of a column have 8 bits");
static_assert(RING_BYTES % 1024 == 0, "pieces of A begin with the swizzle");

__device__ __forceinline__ void meet_helpers() { sync_named_barrier(1, HELPER_THREADS); }

__device__ __forceinline__ bool is_own_row(int row, int split) { return SPLIT == 1 || row / 8 % 2 == split; }

// Slot and rank of an adapter, 16 bits each; 0: none.
struct Adapter {
    u32 packed;

    __device__ __forceinline__ int slot() const { return packed & 0xffff; }
    __device__ __forceinline__ int rank() const { return packed >> 16; }
};

// A row of x with an adapter, in the order of adapters: row, sorted row, number of its adapter among eight columns'.
struct Column {
    u32 packed;

    __device__ __forceinline__ int row() const { return packed & 0xff; }
    __device__ __forceinline__ int sorted() const { return packed >> 8 & 0xff; }
    __device__ __forceinline__ int run() const { return packed >> 16; }
};

// Up to eight sorted rows of one adapter, whose x @ A is summed at once: slot in 16 bits, first row in 8, rows.
struct Group {
    u32 packed;

    __device__ __forceinline__ int slot() const { return packed & 0xffff; }
    __device__ __forceinline__ int first() const { return packed >> 16 & 0xff; }
    __device__ __forceinline__ int num_rows() const { return packed >> 24; }
};

// Behind the ring's barriers: what adapters add to a tile, and what helpers need for it.
struct Adapters {
    u32 ready, taken;  // barriers of what is added
    int *num_columns, *num_groups;
    unsigned char* compact;  // of one part: [column][rank step][rounded, rest][16] elements
    float* added;            // [row of x][weight row]
    u32 *of_sorted, *columns, *runs;  // adapters by sorted row; columns; adapters of each eight of them, then zeros
    u32* groups;
    u32 rings;  // of the helpers, RING_BYTES each
    unsigned char* ring_memory;

    __device__ __forceinline__ Adapters(const Shared& shared, unsigned char* memory) {
        ready = shared.x_scales();
        taken = ready + 8;
        unsigned char* at = memory + (ready - shared_address(memory)) + BARRIERS_BYTES - 16;
        num_columns = reinterpret_cast<int*>(at);
        num_groups = num_columns + 1;
        compact = at + 16;
        added = reinterpret_cast<float*>(compact + COMPACT_BYTES);
        of_sorted = reinterpret_cast<u32*>(added + ADDED_ROWS * ADDED_STRIDE);
        columns = of_sorted + COLS;
        runs = columns + COLS;
        groups = runs + COLS;
        rings = (shared_address(groups + COLS) + 1023) / 1024 * 1024;
        ring_memory = memory + (rings - shared_address(memory));
    }
    __device__ __forceinline__ u32 a_full(int helper, int piece) const {
        return ready + 16 + (helper * MAX_PIECES + piece) * 8;
    }
    __device__ __forceinline__ u32 b_full(int helper, int piece) const { return a_full(HELPERS + helper, piece); }
    __device__ __forceinline__ float* row(int row) const {
        return added + (SPLIT == 2 ? row / 16 * 8 + row % 8 : row) * ADDED_STRIDE;
    }
};

// A tile's weight rows in one part of the outputs.
struct PartRows {
    int part, begin, end;
};

struct Parts {
    int first_end, second_end, n_size;

    __device__ __forceinline__ int first(int row) const { return (row >= first_end) + (row >= second_end); }
    __device__ __forceinline__ int num_parts(int row) const {
        return first(min(row + ROWS, n_size) - 1) - first(row) + 1;
    }
    __device__ __forceinline__ PartRows rows(int part, int row) const {
        const int begin = part == 0 ? 0 : part == 1 ? first_end : second_end;
        const int end = part == 0 ? first_end : part == 1 ? second_end : n_size;
        return {part, max(row, begin), min(row + ROWS, end)};
    }
};

// A warp lists groups, and adapters by sorted row; nothing of it is written by kernels of this step.
__device__ __forceinline__ void list_groups(const Adapters& adapters, const int* tiles, const int* ranks,
                                            int num_tiles) {
    constexpr int STEPS = (COLS + WARP_SIZE - 1) / WARP_SIZE + 1;  // of a warp, loaded at once
    const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
    for (int m = lane; m < COLS; m += WARP_SIZE) adapters.of_sorted[m] = adapters.runs[m] = 0;
    int num_groups = 0;
    for (int base = 0; base < num_tiles; base += STEPS * WARP_SIZE) {
        int slots[STEPS], firsts[STEPS], counts[STEPS], rank_of[STEPS];
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const int tile = base + step * WARP_SIZE + lane;
            const bool exists = tile < num_tiles;
            slots[step] = exists ? tiles[3 * tile] : 0;
            firsts[step] = exists ? tiles[3 * tile + 1] : 0;
            counts[step] = exists ? tiles[3 * tile + 2] : 0;
        }
#pragma unroll
        for (int step = 0; step < STEPS; ++step) rank_of[step] = counts[step] > 0 ? ranks[slots[step]] : 0;
        __syncwarp();
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const int slot = slots[step], first = firsts[step], count = counts[step], rank = rank_of[step];
            const int own = rank > 0 ? (count + 7) / 8 : 0;
            for (int m = first; m < first + count; ++m) adapters.of_sorted[m] = slot | rank << 16;
            int end = own;
#pragma unroll
            for (int offset = 1; offset < WARP_SIZE; offset *= 2) {
                const int before = __shfl_up_sync(FULL_WARP, end, offset);
                if (lane >= offset) end += before;
            }
            for (int n = 0; n < own; ++n)
                adapters.groups[num_groups + end - own + n] = slot | first + 8 * n << 16 | min(8, count - 8 * n) << 24;
            num_groups += __shfl_sync(FULL_WARP, end, WARP_SIZE - 1);
        }
    }
    if (lane == 0) *adapters.num_groups = num_groups;
}

// A warp lists the columns of this block's rows.
__device__ __forceinline__ void list_columns(const Adapters& adapters, const int* rows, int split) {
    const int lane = threadIdx.x % WARP_SIZE;
    int listed = 0;
#pragma unroll
    for (int m = lane; m < COLS; m += WARP_SIZE) {
        const bool has_rank = Adapter{adapters.of_sorted[m]}.rank() > 0;
        const int row = has_rank ? rows[m] : 0;
        const bool is_own = has_rank && is_own_row(row, split);
        const u32 own = __ballot_sync(FULL_WARP, is_own);
        if (is_own) adapters.columns[listed + __popc(own & ((1u << lane) - 1))] = row | m << 8;
        listed += __popc(own);
    }
    __syncwarp();
#pragma unroll
    for (int j = lane; j < COLS; j += WARP_SIZE) {
        const Column own{j < listed ? adapters.columns[j] : 0};
        const u32 adapter = j < listed ? adapters.of_sorted[own.sorted()] : 0;
        const u32 before = __shfl_up_sync(FULL_WARP, adapter, 1);
        const bool begins = j < listed && (j % 8 == 0 || adapter != before);
        const u32 runs = __ballot_sync(FULL_WARP, begins) >> (lane / 8 * 8);
        const int run = __popc(runs & ((2u << lane % 8) - 1)) - 1;
        if (j < listed) adapters.columns[j] = own.packed | run << 16;
        if (begins) adapters.runs[j / 8 * 8 + run] = adapter;
    }
    if (lane == 0) *adapters.num_columns = listed;
}
