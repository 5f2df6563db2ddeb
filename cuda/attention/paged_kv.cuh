// Paged KV cache: block tables, shared-memory tiles, float32 attention. Scores are in log2 units.
//
// Build macros: HEAD_DIM (multiple of 16, at most 256), BLOCK_SIZE (power of two from 8), GROUP (query heads per kv
// head)
#pragma once

#include "common/mma.cuh"
#include "common/types.cuh"

#if QUIRE_KV_FP8
#include "common/fp8.cuh"
using Kv = u8;
#else
using Kv = T;
#endif

static_assert(HEAD_DIM % 16 == 0 && HEAD_DIM <= 256, "head_dim is a multiple of 16 up to 256");
static_assert(BLOCK_SIZE >= 8 && (BLOCK_SIZE & (BLOCK_SIZE - 1)) == 0, "block_size is a power of two from 8 up");

constexpr __host__ __device__ int ceil_div(int a, int b) { return (a + b - 1) / b; }
constexpr __host__ __device__ int at_most(int a, int b) { return a < b ? a : b; }

// One layer of kv_scales [L, 2, Hkv]: value = stored * scale; 1 for a cache of T.
struct KvScales {
    const float* of_layer;
    int num_kv_heads;

    __device__ __forceinline__ KvScales(const float* kv_scales, int layer, int num_kv_heads)
        : of_layer(kv_scales + 2 * layer * num_kv_heads), num_kv_heads(num_kv_heads) {}
#if QUIRE_KV_FP8
    __device__ __forceinline__ float key(int head) const { return __ldg(of_layer + head); }
    __device__ __forceinline__ float value(int head) const { return __ldg(of_layer + num_kv_heads + head); }
#else
    __device__ __forceinline__ float key(int) const { return 1.0f; }
    __device__ __forceinline__ float value(int) const { return 1.0f; }
#endif
};

// Keys and values of a sequence, layer and kv head. A block id outside the pool reads as zeros.
struct PagedHead {
    const Kv* keys;
    u32 block_stride;  // elements between blocks
    u32 value_offset;  // elements from key to value
    const int* table;
    int num_blocks;
    int max_blocks;

    __device__ __forceinline__ PagedHead(const Kv* kv, const int* table, int num_blocks, int max_blocks, int num_layers,
                                         int layer, int num_kv_heads, int head)
        : table(table), num_blocks(num_blocks), max_blocks(max_blocks) {
        value_offset = num_kv_heads * BLOCK_SIZE * HEAD_DIM;
        block_stride = 2 * num_layers * value_offset;
        keys = kv + 2 * layer * value_offset + head * BLOCK_SIZE * HEAD_DIM;
    }

    __device__ __forceinline__ bool holds(int block_id) const {
        return static_cast<u32>(block_id) < static_cast<u32>(num_blocks);
    }

    // Block table entry, clamped to the last.
    __device__ __forceinline__ const int* entry(int block) const { return table + min(block, max_blocks - 1); }

    // Key `offset` of a block; an id outside the pool gives block 0.
    __device__ __forceinline__ const Kv* key_at(int block_id, int offset) const {
        return keys + static_cast<u64>(holds(block_id) ? block_id : 0) * block_stride + offset * HEAD_DIM;
    }

    __device__ __forceinline__ int clamped(int context_len) const {
        return max(0, min(context_len, max_blocks * BLOCK_SIZE));
    }
};

__device__ __forceinline__ float minus_infinity() { return -positive_infinity(); }

// The maximum, or 0 if no key was visible: avoids inf - inf.
__device__ __forceinline__ float finite_base(float maximum) { return maximum == minus_infinity() ? 0.0f : maximum; }

__device__ __forceinline__ float reciprocal_or_zero(float total) {
    return total == 0.0f ? 0.0f : __fdividef(1.0f, total);
}

#define SCALES_QUERIES (QUIRE_KV_FP8 && QUIRE_DTYPE == 2)

#if QUIRE_DTYPE != 0

// Rows of 16-byte chunks. Eight rows of a column have no bank conflicts: chunks are XORed with the row (SWIZZLED, base
// aligned to ROW_BYTES), or their number per row is odd.
template <int NUM_CHUNKS>
struct TileOf {
    static constexpr int CHUNKS = NUM_CHUNKS;
    static constexpr bool SWIZZLED = CHUNKS >= 8 && (CHUNKS & (CHUNKS - 1)) == 0;
    static constexpr int ROW_BYTES = 16 * (SWIZZLED ? CHUNKS : CHUNKS | 1);

    __device__ __forceinline__ static u32 offset(int row, int chunk) {
        return row * ROW_BYTES + 16 * (SWIZZLED ? chunk ^ (row & 7) : chunk);
    }

    __device__ __forceinline__ static u32 right_of(u32 address, int pairs) {
        return SWIZZLED ? address ^ (32 * pairs) : address + 32 * pairs;
    }
};
using SharedTile = TileOf<HEAD_DIM / 8>;  // of 16-bit elements
using KvTile = TileOf<HEAD_DIM * sizeof(Kv) / 16>;  // of cache elements

__device__ __forceinline__ uint4 load_chunk(u32 from) {
    uint4 chunk;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(chunk.x), "=r"(chunk.y), "=r"(chunk.z), "=r"(chunk.w)
                 : "r"(from)
                 : "memory");
    return chunk;
}

__device__ __forceinline__ void store_chunk(u32 to, uint4 chunk) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(to), "r"(chunk.x), "r"(chunk.y), "r"(chunk.z), "r"(chunk.w)
                 : "memory");
}

#if QUIRE_KV_FP8
// Separate from store_widened, so that loads can precede stores.
__device__ __forceinline__ uint2 load_eight(u32 from) {
    uint2 eight;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(eight.x), "=r"(eight.y) : "r"(from) : "memory");
    return eight;
}

__device__ __forceinline__ void store_widened(u32 to, uint2 eight) {
    store_chunk(to, make_uint4(e4m3_to_f16<0>(eight.x), e4m3_to_f16<1>(eight.x), e4m3_to_f16<0>(eight.y),
                               e4m3_to_f16<1>(eight.y)));
}

#if QUIRE_DTYPE == 2
// Power of two that makes bfloat16 queries float16: the largest becomes at least 2^14, exact down to 2^-28 of it.
struct QueryScale {
    __nv_bfloat162 up;
    float down;

    __device__ __forceinline__ QueryScale(u32 largest) {
        const u32 exponent = min(max(largest >> 7, 15u), 254u);  // biased
        up = __float2bfloat162_rn(__uint_as_float((268 - exponent) << 23));
        down = __uint_as_float((exponent - 14) << 23);
    }
    __device__ __forceinline__ u32 scaled(u32 pair) const {
        const __nv_bfloat162 two = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&pair), up);
        const float2 floats = unpack_pair(*reinterpret_cast<const u32*>(&two));
        return pack_operand(floats.x, floats.y);
    }
};

constexpr u32 MAGNITUDES = 0x7fff7fffu;
constexpr u32 INFINITY_BITS = 0x7f80u;

__device__ __forceinline__ u32 larger_of_pair(u32 pair) { return max(pair & 0xffffu, pair >> 16); }

// Skips infinities and NaN, which would affect other rows.
__device__ __forceinline__ u32 finite_of_pair(u32 pair) {
    const u32 low = pair & 0xffffu, high = pair >> 16;
    return max(low < INFINITY_BITS ? low : 0, high < INFINITY_BITS ? high : 0);
}

// Scales a warp's query rows in place by one QueryScale; returns its `down`. Ignores rows from `num_held` on.
template <int NUM_ROWS, typename Address>
__device__ __forceinline__ float scale_queries(int num_held, const Address& address) {
    constexpr int CHUNKS = HEAD_DIM / 8, BATCH = 8, NUM_CHUNKS = NUM_ROWS * CHUNKS / WARP_SIZE;
    static_assert(NUM_ROWS * CHUNKS % WARP_SIZE == 0, "every lane has the same number of chunks");
    const int lane = threadIdx.x % WARP_SIZE;
    const auto at = [&](int i) { return address((lane + i * WARP_SIZE) / CHUNKS, (lane + i * WARP_SIZE) % CHUNKS); };
    const auto largest_by = [&](auto of_pair) {
        u32 largest = 0;
#pragma unroll BATCH
        for (int i = 0; i < NUM_CHUNKS; ++i) {
            const uint4 chunk = load_chunk(at(i));
            const u32 pairs = __vmaxu2(__vmaxu2(chunk.x & MAGNITUDES, chunk.y & MAGNITUDES),
                                       __vmaxu2(chunk.z & MAGNITUDES, chunk.w & MAGNITUDES));
            if ((lane + i * WARP_SIZE) / CHUNKS < num_held) largest = max(largest, of_pair(chunk, pairs));
        }
        return warp_max(largest);
    };
    u32 largest = largest_by([](const uint4&, u32 pairs) { return larger_of_pair(pairs); });
    if (largest >= INFINITY_BITS)
        largest = largest_by([](const uint4& chunk, u32) {
            return max(max(finite_of_pair(chunk.x & MAGNITUDES), finite_of_pair(chunk.y & MAGNITUDES)),
                       max(finite_of_pair(chunk.z & MAGNITUDES), finite_of_pair(chunk.w & MAGNITUDES)));
        });
    const QueryScale scale(largest);
#pragma unroll BATCH
    for (int i = 0; i < NUM_CHUNKS; ++i) {
        const uint4 chunk = load_chunk(at(i));
        store_chunk(at(i), make_uint4(scale.scaled(chunk.x), scale.scaled(chunk.y), scale.scaled(chunk.z),
                                      scale.scaled(chunk.w)));
    }
    return scale.down;
}
#endif
#endif

#else

// Online softmax of a warp's query row: a lane owns dimensions lane, lane + 32, ...
struct RowState {
    static constexpr int DIMS = ceil_div(HEAD_DIM, WARP_SIZE);
    float maximum = minus_infinity();
    float total = 0.0f;
    float sum[DIMS] = {};
};

#if QUIRE_KV_FP8
__device__ __forceinline__ float widened(u8 x) { return e4m3_to_float(x); }

__device__ __forceinline__ float dot_row(const float* a, const u8* b) {
    float sum = 0.0f;
#pragma unroll 4
    for (int d = 0; d < HEAD_DIM; ++d) sum = fmaf(a[d], widened(b[d]), sum);
    return sum;
}
#else
__device__ __forceinline__ float widened(float x) { return x; }

__device__ __forceinline__ float dot_row(const float* a, const float* b) {
    float sum = 0.0f;
#pragma unroll 8
    for (int d = 0; d < HEAD_DIM; d += 4) {
        const Vec<float> x = load_vec(a + d), y = load_vec(b + d);
#pragma unroll
        for (int i = 0; i < 4; ++i) sum = fmaf(x.at[i], y.at[i], sum);
    }
    return sum;
}
#endif

// Adds keys begin <= token < end: one per lane, 32 every `stride` tokens.
__device__ __forceinline__ void attend_row(RowState& state, const float* q, const PagedHead& head, int begin, int end,
                                           int stride, float scale_log2) {
    const int lane = threadIdx.x % WARP_SIZE;
    for (int base = begin; base < end; base += stride) {
        const int token = base + lane;
        const int block_id = *head.entry(token / BLOCK_SIZE);
        const bool is_stored = token < end && head.holds(block_id);
        const Kv* key = head.key_at(block_id, token % BLOCK_SIZE);
        const float score = token < end ? (is_stored ? dot_row(q, key) * scale_log2 : 0.0f) : minus_infinity();

        const float maximum = fmaxf(state.maximum, warp_max(score));
        const float correction = exp2_approx(state.maximum - finite_base(maximum));
        const float weight = exp2_approx(score - finite_base(maximum));
        state.maximum = maximum;
        state.total = state.total * correction + warp_sum(weight);
#pragma unroll
        for (int i = 0; i < RowState::DIMS; ++i) state.sum[i] *= correction;
        for (int j = 0; j < min(WARP_SIZE, end - base); ++j) {
            const float weight_j = __shfl_sync(FULL_WARP, weight, j);
            const bool is_stored_j = __shfl_sync(FULL_WARP, is_stored, j);
            const u64 key_j = __shfl_sync(FULL_WARP, reinterpret_cast<u64>(key), j);
            if (!is_stored_j) continue;
            const Kv* value = reinterpret_cast<const Kv*>(key_j) + head.value_offset;
#pragma unroll
            for (int i = 0; i < RowState::DIMS; ++i) {
                const int d = lane + i * WARP_SIZE;
                if (d < HEAD_DIM) state.sum[i] = fmaf(weight_j, widened(value[d]), state.sum[i]);
            }
        }
    }
}

#endif
