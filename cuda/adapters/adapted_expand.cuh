// What the rows' adapters add to a tile of the outputs, of what shrink has summed and B, by the helpers of
// adapted_product_sm90. Included by that kernel alone.
#pragma once

#include "adapters/adapted_batch.cuh"

constexpr int RUNS = 4 / RANK_STEPS;                // adapters of a piece
constexpr int B_BYTES = RUNS * RANK_STEPS * 512;  // of a piece: 16 rows of each
constexpr int B_PIECES = RING_BYTES / B_BYTES < MAX_PIECES ? RING_BYTES / B_BYTES : MAX_PIECES;

struct Shrunk {
    const float* values;
    int num_splits, num_sorted, num_parts, max_rank;

    __device__ __forceinline__ float4 sum(int row, int part, int r) const {
        const float* from = values + (static_cast<i64>(row) * num_parts + part) * max_rank + r;
        const i64 stride = static_cast<i64>(num_sorted) * num_parts * max_rank;
        float4 sum = {};
#pragma unroll 8
        for (int c = 0; c < num_splits; ++c) {
            float4 more;  // past the L1: written during this kernel
            asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                         : "=f"(more.x), "=f"(more.y), "=f"(more.z), "=f"(more.w)
                         : "l"(from + c * stride));
            sum = make_float4(sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w);
        }
        return sum;
    }
};

// The helpers round one part's operands of all columns.
__device__ __forceinline__ void round_part(const Adapters& adapters, const Shrunk& shrunk, int part, int thread) {
    const int num_quads = *adapters.num_columns * RANK_STEPS * 4;
#pragma unroll 2
    for (int task = thread; task < num_quads; task += HELPER_THREADS) {
        const int j = task / (RANK_STEPS * 4), r = task % (RANK_STEPS * 4) * 4;
        const int sorted = Column{adapters.columns[j]}.sorted(), rank = Adapter{adapters.of_sorted[sorted]}.rank();
        float4 sum = {};
        if (r < rank) sum = shrunk.sum(sorted, part, r);
        // beyond the rank: undefined
        const float values[4] = {sum.x, r + 1 < rank ? sum.y : 0.0f, r + 2 < rank ? sum.z : 0.0f,
                                 r + 3 < rank ? sum.w : 0.0f};
        u32 rounded[2], rest[2];
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
            rounded[pair] = pack_pair(values[2 * pair], values[2 * pair + 1]);
            const float2 known = unpack_pair(rounded[pair]);
            rest[pair] = pack_pair(values[2 * pair] - known.x, values[2 * pair + 1] - known.y);
        }
        unsigned char* to = adapters.compact + (j * RANK_STEPS + r / 16) * 64 + r % 16 * 2;
        *reinterpret_cast<uint2*>(to) = make_uint2(rounded[0], rounded[1]);
        *reinterpret_cast<uint2*>(to + 32) = make_uint2(rest[0], rest[1]);
    }
}

struct B {
    const T* values;
    int n_size, max_rank;

    __device__ __forceinline__ const T* of(u32 adapter, int n) const {
        return values + (static_cast<i64>(Adapter{adapter}.slot()) * n_size + n) * max_rank;
    }
};

// A helper's pieces of B of a part, in the order of its products: 16 rows of up to RUNS adapters of eight columns.
struct BPieces {
    const Adapters& adapters;
    const B& b;
    PartRows part;
    int helper, num_columns, begin, step;
    int eight, base, n;
    u32 number;  // of the next, in all parts and tiles

    __device__ __forceinline__ BPieces(const Adapters& adapters, const B& b, int helper)
        : adapters(adapters), b(b), helper(helper), number(0) {}

    __device__ __forceinline__ void start(const PartRows& rows) {
        part = rows;
        num_columns = *adapters.num_columns;
        const int num_eights = (num_columns + 7) / 8;
        eight = 0;
        if (num_eights == 0) return;
        const int first = helper % num_eights, first_group = helper / num_eights;  // few columns: warps share rows
        const int num_sharing = num_eights < HELPERS ? (HELPERS - first + num_eights - 1) / num_eights : 1;
        begin = part.begin + (num_sharing > 1 ? 16 * first_group : 0);
        step = 16 * num_sharing;
        eight = 8 * first;
        base = 0;
        n = begin;
        if (begin >= part.end) eight = num_columns;
    }
    __device__ __forceinline__ bool is_over() const { return eight >= num_columns; }
    __device__ __forceinline__ int num_runs() const {
        int count = 0;
#pragma unroll
        for (int k = 0; k < RUNS; ++k) count += Adapter{adapters.runs[eight + base + k]}.rank() > 0;
        return count;
    }
    __device__ __forceinline__ void advance() {
        ++number;
        n += step;
        if (n < part.end) return;
        n = begin;
        base += RUNS;
        if (base < 8 && Adapter{adapters.runs[eight + base]}.rank() > 0) return;
        base = 0;
        eight += 8 * HELPERS;
    }
    __device__ __forceinline__ u32 slot() const { return number % B_PIECES; }
    __device__ __forceinline__ u32 offset() const { return helper * RING_BYTES + slot() * B_BYTES; }
    // By a warp.
    __device__ __forceinline__ void fetch() {
        const int lane = threadIdx.x % WARP_SIZE, count = num_runs();
        const int num_bytes = min(16, part.end - n) * b.max_rank * 2;
        const u32 full = adapters.b_full(helper, slot());
        if (lane == 0) arrive_expecting(full, count * num_bytes);
        __syncwarp();
        if (lane < count)
            copy_bytes(adapters.rings + offset() + lane * RANK_STEPS * 512, b.of(adapters.runs[eight + base + lane], n),
                       num_bytes, full);
        advance();
    }
    __device__ __forceinline__ void fetch_first() {
        for (int piece = 0; piece < B_PIECES && !is_over(); ++piece) fetch();
    }
};

// The helpers' products of a part: a warp takes eight columns by 16 weight rows after another. An adapter's operands
// are zeros in columns of others.
__device__ __forceinline__ void expand(const Adapters& adapters, BPieces& now, BPieces& ahead, int tile_row) {
    const int lane = threadIdx.x % WARP_SIZE, g = lane / 4, t = lane % 4;
    constexpr int ROW_BYTES = 32 * RANK_STEPS;
    while (!now.is_over()) {
        const int eight = now.eight, base = now.base, count = now.num_runs(), num_columns = now.num_columns;
        const bool is_column = eight + g < num_columns;
        const int own_run = is_column ? Column{adapters.columns[eight + g]}.run() - base : -1;
        uint2 rounded[RANK_STEPS], rest[RANK_STEPS];
#pragma unroll
        for (int s = 0; s < RANK_STEPS; ++s) {
            const unsigned char* from = adapters.compact + ((eight + g) * RANK_STEPS + s) * 64 + 8 * t;
            rounded[s] = is_column ? *reinterpret_cast<const uint2*>(from) : uint2{};
            rest[s] = is_column ? *reinterpret_cast<const uint2*>(from + 32) : uint2{};
        }
        float* to[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int j = eight + 2 * t + c;
            const Column column{j < num_columns ? adapters.columns[j] : 0xff0000u};
            const bool is_of_runs = column.run() >= base && column.run() < base + RUNS;
            to[c] = is_of_runs ? adapters.row(column.row()) + g - tile_row : nullptr;
        }
        do {
            const int n = now.n;
            wait_for(adapters.b_full(now.helper, now.slot()), now.number / B_PIECES % 2);
            const unsigned char* piece = adapters.ring_memory + now.offset() + g * ROW_BYTES + 8 * t;
            float sum[4] = {}, rests[4] = {};
#pragma unroll
            for (int k = 0; k < RUNS; ++k) {
                if (k >= count) break;
                const bool is_own = own_run == k;
#pragma unroll
                for (int s = 0; s < RANK_STEPS; ++s) {
                    const unsigned char* from = piece + k * RANK_STEPS * 512 + s * 32;
                    const uint2 near = *reinterpret_cast<const uint2*>(from);
                    const uint2 far = *reinterpret_cast<const uint2*>(from + 8 * ROW_BYTES);
                    const u32 weights[4] = {near.x, far.x, near.y, far.y};
                    mma_16x8x16(sum, weights, is_own ? rounded[s].x : 0, is_own ? rounded[s].y : 0);
                    mma_16x8x16(rests, weights, is_own ? rest[s].x : 0, is_own ? rest[s].y : 0);
                }
            }
            __syncwarp();
            if (!ahead.is_over()) ahead.fetch();
            now.advance();
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                if (to[c] == nullptr) continue;
                to[c][n] = sum[c] + rests[c];
                if (now.part.end - n > 8) to[c][n + 8] = sum[2 + c] + rests[2 + c];
            }
        } while (!now.is_over() && now.eight == eight && now.base == base);
    }
}
