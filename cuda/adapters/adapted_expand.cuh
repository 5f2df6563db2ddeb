// LoRA expand: deltas (x @ A) @ B.T of an output tile, by the helpers of adapted_product_sm90 alone.
#pragma once

#include "adapters/adapted_batch.cuh"

constexpr int B_ROW_BYTES = 32 * RANK_STEPS;
constexpr int RUNS = 4 / RANK_STEPS;  // adapters per piece
constexpr int B_ROWS = RING_BYTES / 4 / (RUNS * B_ROW_BYTES) / 16 * 16;
constexpr int B_BYTES = RUNS * B_ROWS * B_ROW_BYTES;  // per piece
constexpr int B_PIECES = RING_BYTES / B_BYTES < MAX_PIECES ? RING_BYTES / B_BYTES : MAX_PIECES;
static_assert(B_ROWS > 0, "a piece has 16 rows");

// The helpers round the operands of one or two parts, all columns.
__device__ __forceinline__ void round_parts(const Adapters& adapters, const Shrunk& shrunk, int part, int num_now,
                                            int thread) {
    const int num_quads = *adapters.num_columns * RANK_STEPS * 4;
    for (int task = thread; task < num_now * num_quads; task += HELPER_THREADS) {
        const int second = task >= num_quads, quad = second ? task - num_quads : task;
        const int j = quad / (RANK_STEPS * 4), r = quad % (RANK_STEPS * 4) * 4;
        const int sorted = Column{adapters.columns[j]}.sorted(), rank = Adapter{adapters.of_sorted[sorted]}.rank();
        float4 sum = {};
        if (r < rank) sum = shrunk.sum(sorted, part + second, r);
        // undefined beyond the rank
        const float values[4] = {sum.x, r + 1 < rank ? sum.y : 0.0f, r + 2 < rank ? sum.z : 0.0f,
                                 r + 3 < rank ? sum.w : 0.0f};
        u32 rounded[2], rest[2];
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
            rounded[pair] = pack_pair(values[2 * pair], values[2 * pair + 1]);
            const float2 known = unpack_pair(rounded[pair]);
            rest[pair] = pack_pair(values[2 * pair] - known.x, values[2 * pair + 1] - known.y);
        }
        unsigned char* to = adapters.compact + second * COMPACT_BYTES + (j * RANK_STEPS + r / 16) * 64 + r % 16 * 2;
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

// A helper's pieces of B in the order of its products: B_ROWS rows of up to RUNS adapters of eight columns.
struct BPieces {
    const Adapters& adapters;
    const B& b;
    const Parts& parts;
    int helper, num_columns, first_eight, skipped, step;
    int row, end_part;
    PartRows part;
    int eight, base, n;
    u32 number;  // of the next piece, over all parts and tiles

    __device__ __forceinline__ BPieces(const Adapters& adapters, const B& b, const Parts& parts, int helper)
        : adapters(adapters), b(b), parts(parts), helper(helper), number(0) {
        num_columns = *adapters.num_columns;
        int log = 0;  // log2 of eight-column groups at once; with few groups several warps share the rows
        while (1 << log < HELPERS && 8 << log < num_columns) ++log;
        first_eight = 8 * (helper & (1 << log) - 1);
        skipped = B_ROWS * (helper >> log);
        step = B_ROWS * HELPERS >> log;
    }
    __device__ __forceinline__ void start(int tile_row, int first_part, int num_parts) {
        row = tile_row;
        end_part = num_columns > 0 ? first_part + num_parts : first_part;
        begin_part(first_part);
    }
    __device__ __forceinline__ void begin_part(int first_part) {
        part.part = first_part;
        for (; part.part < end_part; ++part.part) {
            part = parts.rows(part.part, row);
            eight = first_eight;
            base = 0;
            n = part.begin + skipped;
            if (n < part.end && eight < num_columns) return;
        }
    }
    __device__ __forceinline__ bool is_over() const { return part.part >= end_part; }
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
        n = part.begin + skipped;
        base += RUNS;
        if (base < 8 && Adapter{adapters.runs[eight + base]}.rank() > 0) return;
        base = 0;
        eight += 8 * HELPERS;
        if (eight >= num_columns) begin_part(part.part + 1);
    }
    __device__ __forceinline__ u32 slot() const { return number % B_PIECES; }
    __device__ __forceinline__ u32 offset() const { return helper * RING_BYTES + slot() * B_BYTES; }
    // Called by a warp.
    __device__ __forceinline__ void fetch() {
        const int lane = threadIdx.x % WARP_SIZE, count = num_runs();
        const int num_bytes = min(B_ROWS, part.end - n) * b.max_rank * 2;
        const u32 full = adapters.b_full(helper, slot());
        if (lane == 0) arrive_expecting(full, count * num_bytes);
        __syncwarp();
        if (lane < count)
            copy_bytes(adapters.rings + offset() + lane * B_ROWS * B_ROW_BYTES,
                       b.of(adapters.runs[eight + base + lane], n), num_bytes, full);
        advance();
    }
    __device__ __forceinline__ void fetch_first() {
        for (int piece = 0; piece < B_PIECES && !is_over(); ++piece) fetch();
    }
};

// The helpers' products of parts from `first_part` on; a warp computes 8 columns x 16 weight rows at a time. An
// adapter's operands are zeros in columns of others.
__device__ __forceinline__ void expand(const Adapters& adapters, BPieces& now, BPieces& ahead, int tile_row,
                                       int first_part) {
    const int lane = threadIdx.x % WARP_SIZE, g = lane / 4, t = lane % 4;
    while (!now.is_over()) {
        const int part = now.part.part, eight = now.eight, base = now.base;
        const int count = now.num_runs(), num_columns = now.num_columns;
        const bool is_column = eight + g < num_columns;
        const int own_run = is_column ? Column{adapters.columns[eight + g]}.run() - base : -1;
        uint2 rounded[RANK_STEPS], rest[RANK_STEPS];
#pragma unroll
        for (int s = 0; s < RANK_STEPS; ++s) {
            const unsigned char* from = adapters.compact + (part - first_part) * COMPACT_BYTES +
                                        ((eight + g) * RANK_STEPS + s) * 64 + 8 * t;
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
            const int n = now.n, num_rows = min(B_ROWS, now.part.end - n);
            wait_for(adapters.b_full(now.helper, now.slot()), now.number / B_PIECES % 2);
            const unsigned char* piece = adapters.ring_memory + now.offset() + g * B_ROW_BYTES + 8 * t;
#pragma unroll 1
            for (int m = 0; m < num_rows; m += 16) {
                float sum[4] = {}, rests[4] = {};
#pragma unroll
                for (int k = 0; k < RUNS; ++k) {
                    if (k >= count) break;
                    const bool is_own = own_run == k;
#pragma unroll
                    for (int s = 0; s < RANK_STEPS; ++s) {
                        const unsigned char* from = piece + (k * B_ROWS + m) * B_ROW_BYTES + s * 32;
                        const uint2 near = *reinterpret_cast<const uint2*>(from);
                        const uint2 far = *reinterpret_cast<const uint2*>(from + 8 * B_ROW_BYTES);
                        const u32 weights[4] = {near.x, far.x, near.y, far.y};
                        mma_16x8x16(sum, weights, is_own ? rounded[s].x : 0, is_own ? rounded[s].y : 0);
                        mma_16x8x16(rests, weights, is_own ? rest[s].x : 0, is_own ? rest[s].y : 0);
                    }
                }
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    if (to[c] == nullptr) continue;
                    to[c][n + m] = sum[c] + rests[c];
                    if (num_rows - m > 8) to[c][n + m + 8] = sum[2 + c] + rests[2 + c];
                }
            }
            __syncwarp();
            if (!ahead.is_over()) ahead.fetch();
            now.advance();
        } while (!now.is_over() && now.part.part == part && now.eight == eight && now.base == base);
    }
}
