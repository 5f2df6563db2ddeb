// Shared by decode and prefill attention: the walk through the block table, tiles in shared memory, and the float32
// path, where a warp folds keys into one query row on the CUDA cores.
//
// A build defines HEAD_DIM (a multiple of 16, at most 256), BLOCK_SIZE (a power of two, at least 8) and GROUP, the
// query heads of one kv head. Scores are kept in units of log2, so that a weight is one exp2.
#pragma once

#include "common/mma.cuh"
#include "common/types.cuh"

static_assert(HEAD_DIM % 16 == 0 && HEAD_DIM <= 256, "head_dim is a multiple of 16 up to 256");
static_assert(BLOCK_SIZE >= 8 && (BLOCK_SIZE & (BLOCK_SIZE - 1)) == 0, "block_size is a power of two from 8 up");

constexpr __host__ __device__ int ceil_div(int a, int b) { return (a + b - 1) / b; }
constexpr __host__ __device__ int at_most(int a, int b) { return a < b ? a : b; }

// The keys and values of one sequence, layer and kv head in kv [num_blocks, L, 2, Hkv, BLOCK_SIZE, HEAD_DIM]. Tokens of
// a block id outside the pool read as zeros.
struct PagedHead {
    const T* keys;      // token 0 of block 0
    u32 block_stride;   // elements from a block to the next
    u32 value_offset;   // elements from a key to its value
    const int* table;   // the sequence's row of block_tables
    int num_blocks;
    int max_blocks;     // entries of `table`

    __device__ __forceinline__ PagedHead(const T* kv, const int* table, int num_blocks, int max_blocks, int num_layers,
                                         int layer, int num_kv_heads, int head)
        : table(table), num_blocks(num_blocks), max_blocks(max_blocks) {
        value_offset = num_kv_heads * BLOCK_SIZE * HEAD_DIM;
        block_stride = 2 * num_layers * value_offset;
        keys = kv + 2 * layer * value_offset + head * BLOCK_SIZE * HEAD_DIM;
    }

    __device__ __forceinline__ bool holds(int block_id) const {
        return static_cast<u32>(block_id) < static_cast<u32>(num_blocks);
    }

    // The table's entry for a block of the sequence; the last entry for a block past the end.
    __device__ __forceinline__ const int* entry(int block) const { return table + min(block, max_blocks - 1); }

    // Key `offset` of a block. Not to be dereferenced for an id outside the pool.
    __device__ __forceinline__ const T* key_at(int block_id, int offset) const {
        return keys + static_cast<u64>(holds(block_id) ? block_id : 0) * block_stride + offset * HEAD_DIM;
    }

    // A context's tokens, at most as many as the table holds.
    __device__ __forceinline__ int clamped(int context_len) const {
        return max(0, min(context_len, max_blocks * BLOCK_SIZE));
    }
};

__device__ __forceinline__ float minus_infinity() { return -positive_infinity(); }

// The base of the exponents: the running maximum, or 0 while no key was visible (avoids inf - inf).
__device__ __forceinline__ float finite_base(float maximum) { return maximum == minus_infinity() ? 0.0f : maximum; }

// 1 / total; 0 for a row without visible keys; NaN stays NaN.
__device__ __forceinline__ float reciprocal_or_zero(float total) {
    return total == 0.0f ? 0.0f : __fdividef(1.0f, total);
}

#if QUIRE_DTYPE != 0

// Rows of HEAD_DIM 16-bit elements in shared memory, in 16-byte chunks, laid so that eight rows of one chunk column
// touch all 32 banks: chunks XORed with the row where their number is a power of two, else an odd number of them a row.
// The tile's base must be aligned to ROW_BYTES (SWIZZLED) or 16 bytes.
struct SharedTile {
    static constexpr int CHUNKS = HEAD_DIM / 8;
    static constexpr bool SWIZZLED = CHUNKS >= 8 && (CHUNKS & (CHUNKS - 1)) == 0;
    static constexpr int ROW_BYTES = 16 * (SWIZZLED ? CHUNKS : CHUNKS | 1);

    __device__ __forceinline__ static u32 offset(int row, int chunk) {
        return row * ROW_BYTES + 16 * (SWIZZLED ? chunk ^ (row & 7) : chunk);
    }

    // The address `pairs` pairs of chunks to the right of an address in the first pair.
    __device__ __forceinline__ static u32 right_of(u32 address, int pairs) {
        return SWIZZLED ? address ^ (32 * pairs) : address + 32 * pairs;
    }
};

#else

// One query row's running softmax, held by a warp: the lanes own dimensions lane, lane + 32, ...
struct RowState {
    static constexpr int DIMS = ceil_div(HEAD_DIM, WARP_SIZE);
    float maximum = minus_infinity();
    float total = 0.0f;
    float sum[DIMS] = {};
};

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

// Folds the keys begin <= token < end into `state`, 32 at a time, a key a lane; runs of 32 start every `stride` tokens.
__device__ __forceinline__ void attend_row(RowState& state, const float* q, const PagedHead& head, int begin, int end,
                                           int stride, float scale_log2) {
    const int lane = threadIdx.x % WARP_SIZE;
    for (int base = begin; base < end; base += stride) {
        const int token = base + lane;
        const int block_id = *head.entry(token / BLOCK_SIZE);
        const bool is_stored = token < end && head.holds(block_id);
        const float* key = head.key_at(block_id, token % BLOCK_SIZE);
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
            const float* value = reinterpret_cast<const float*>(key_j) + head.value_offset;
#pragma unroll
            for (int i = 0; i < RowState::DIMS; ++i) {
                const int d = lane + i * WARP_SIZE;
                if (d < HEAD_DIM) state.sum[i] = fmaf(weight_j, value[d], state.sum[i]);
            }
        }
    }
}

#endif
