// A batch's LoRA adapters in shared memory, for the helpers of adapted_product_sm90 alone: its warps outside the GEMM.
#pragma once

#include "linear/small_m.cuh"
#if WEIGHT_FP8
#include "common/widen.cuh"
using X = u8;
#else
using X = T;
#endif

constexpr int SPLITS = 4;                      // of K in x @ A
constexpr int HELPERS = 4 * (3 - WARPGROUPS);  // warps
constexpr int HELPER_THREADS = HELPERS * WARP_SIZE;
constexpr int RING_BYTES = RINGS_BYTES / HELPERS;
constexpr int MAX_PIECES = MAX_RING_PIECES;  // per ring
constexpr int MAX_TILES = COLS + COLS / 8;
static_assert(4 * (3 * MAX_TILES + HELPER_THREADS) <= PARTS_AT_ONCE * COMPACT_BYTES, "tiles and ranks fit");
static_assert(COLS <= HELPER_THREADS, "a helper thread has a scale of x");
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

// A row of x with an adapter, in adapter order: row, sorted row, index of its adapter within its eight columns.
struct Column {
    u32 packed;

    __device__ __forceinline__ int row() const { return packed & 0xff; }
    __device__ __forceinline__ int sorted() const { return packed >> 8 & 0xff; }
    __device__ __forceinline__ int run() const { return packed >> 16; }
};

// Up to eight sorted rows of one adapter, summed at once: slot (16 bits), first row (8), number of rows.
struct Group {
    u32 packed;

    __device__ __forceinline__ int slot() const { return packed & 0xffff; }
    __device__ __forceinline__ int first() const { return packed >> 16 & 0xff; }
    __device__ __forceinline__ int num_rows() const { return packed >> 24; }
};

// Helpers' shared memory, after the ring's barriers: LoRA deltas of a tile and lists to compute them.
struct Adapters {
    u32 ready, taken;  // barriers of `added`
    int *num_columns, *num_groups;
    unsigned char* compact;  // [part at once][column][rank step][rounded, rest][16] elements
    float* added;            // [row of x][weight row]
    u32 *of_sorted, *columns, *runs;  // adapters by sorted row; columns; adapters of each eight columns, then zeros
    u32* groups;
    int* sorted_rows;
    float* x_scales;     // with WEIGHT_FP8
    int *tiles, *ranks;  // in `compact`, until operands are rounded
    u32 rings;           // RING_BYTES per helper
    unsigned char* ring_memory;

    __device__ __forceinline__ Adapters(const Shared& shared, unsigned char* memory) {
        ready = shared.x_scales();
        taken = ready + 8;
        unsigned char* at = memory + (ready - shared_address(memory)) + BARRIERS_BYTES - 16;
        num_columns = reinterpret_cast<int*>(at);
        num_groups = num_columns + 1;
        compact = at + 16;
        added = reinterpret_cast<float*>(compact + PARTS_AT_ONCE * COMPACT_BYTES);
        of_sorted = reinterpret_cast<u32*>(added + ADDED_ROWS * ADDED_STRIDE);
        columns = of_sorted + COLS;
        runs = columns + COLS;
        groups = runs + COLS;
        sorted_rows = reinterpret_cast<int*>(groups + COLS);
        x_scales = reinterpret_cast<float*>(sorted_rows + COLS);
        tiles = reinterpret_cast<int*>(compact);
        ranks = tiles + 3 * MAX_TILES;
        rings = (shared_address(x_scales + (WEIGHT_FP8 ? COLS : 0)) + 1023) / 1024 * 1024;
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

// The helpers copy rows, tiles and the first slots' ranks, which no kernel of this step writes.
__device__ __forceinline__ void load_batch(const Adapters& adapters, const int* rows, const int* tiles,
                                           const int* ranks, int num_sorted, int num_tiles, int num_slots,
                                           int thread) {
    const int word = thread < 3 * num_tiles ? tiles[thread] : 0, row = thread < num_sorted ? rows[thread] : 0;
    const int rank = thread < num_slots ? ranks[thread] : 0;
    if (thread < COLS) {
        adapters.of_sorted[thread] = adapters.runs[thread] = 0;
        adapters.sorted_rows[thread] = row;
    }
    adapters.ranks[thread] = rank;
    if (thread < 3 * MAX_TILES) adapters.tiles[thread] = word;
#pragma unroll 1
    for (int i = thread + HELPER_THREADS; i < 3 * num_tiles; i += HELPER_THREADS) adapters.tiles[i] = tiles[i];
}

// One warp lists groups, and adapters by sorted row.
__device__ __forceinline__ void list_groups(const Adapters& adapters, const int* ranks, int num_tiles) {
    const int lane = threadIdx.x % WARP_SIZE;
    const u32 before = (1u << lane) - 1;
    int num_groups = 0;
#pragma unroll 1
    for (int base = 0; base < num_tiles; base += WARP_SIZE) {
        const int* tile = adapters.tiles + 3 * min(base + lane, num_tiles - 1);
        const int slot = tile[0], first = tile[1], count = base + lane < num_tiles ? tile[2] : 0;
        int rank = 0;
        if (count > 0) rank = slot < HELPER_THREADS ? adapters.ranks[slot] : ranks[slot];
        const bool is_any = rank > 0, are_two = is_any && count > 8;
        const u32 any = __ballot_sync(FULL_WARP, is_any), two = __ballot_sync(FULL_WARP, are_two);
        u32* group = adapters.groups + num_groups + __popc(any & before) + __popc(two & before);
        if (is_any) group[0] = slot | first << 16 | min(8, count) << 24;
        if (are_two) group[1] = slot | first + 8 << 16 | count - 8 << 24;
        num_groups += __popc(any) + __popc(two);
#pragma unroll 1
        for (int m = first; m < first + count; ++m) adapters.of_sorted[m] = slot | rank << 16;
    }
    if (lane == 0) *adapters.num_groups = num_groups;
}

// One warp lists the columns of this block's rows.
__device__ __forceinline__ void list_columns(const Adapters& adapters, int split) {
    const int lane = threadIdx.x % WARP_SIZE;
    int listed = 0;
#pragma unroll 1
    for (int m = lane; m < COLS; m += WARP_SIZE) {
        const int row = adapters.sorted_rows[m];
        const bool is_own = Adapter{adapters.of_sorted[m]}.rank() > 0 && is_own_row(row, split);
        const u32 own = __ballot_sync(FULL_WARP, is_own);
        if (is_own) adapters.columns[listed + __popc(own & ((1u << lane) - 1))] = row | m << 8;
        listed += __popc(own);
    }
    __syncwarp();
#pragma unroll 1
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

__device__ __forceinline__ u32 load_relaxed(const u32* from) {
    u32 value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

__device__ __forceinline__ void store_relaxed(u64* to, u64 value) {
    asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" : : "l"(to), "l"(value) : "memory");
}

// Sums of x @ A: [split][sorted row][part][rank], each with its launch's tag in the upper half.
struct Shrunk {
    u64* values;
    u32 tag;
    int num_sorted, num_parts, max_rank;

    // Polls until the sums arrive.
    __device__ __forceinline__ float4 sum(int row, int part, int r) const {
        const u64* from = values + (static_cast<i64>(row) * num_parts + part) * max_rank + r;
        const i64 stride = static_cast<i64>(num_sorted) * num_parts * max_rank;
        float4 sum = {};
        u64 words[SPLITS][4];
        bool are_there;
        do {
#pragma unroll
            for (int c = 0; c < SPLITS; ++c) {
#pragma unroll
                for (int i = 0; i < 4; i += 2)
                    asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];"
                                 : "=l"(words[c][i]), "=l"(words[c][i + 1])
                                 : "l"(from + c * stride + i)
                                 : "memory");
            }
            are_there = true;
#pragma unroll
            for (int c = 0; c < SPLITS; ++c) {
#pragma unroll
                for (int i = 0; i < 4; ++i) are_there &= static_cast<u32>(words[c][i] >> 32) == tag;
            }
        } while (!are_there);
#pragma unroll
        for (int c = 0; c < SPLITS; ++c) {
            sum.x += __uint_as_float(static_cast<u32>(words[c][0]));
            sum.y += __uint_as_float(static_cast<u32>(words[c][1]));
            sum.z += __uint_as_float(static_cast<u32>(words[c][2]));
            sum.w += __uint_as_float(static_cast<u32>(words[c][3]));
        }
        return sum;
    }
};
