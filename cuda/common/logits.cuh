// Rows of logits: one block per row, four tokens per access.
#pragma once

#include "common/types.cuh"

constexpr int LOGITS_THREADS = 1024;

struct LogitsRow {
    const float* at;
    int vocab;
    bool aligned;

    __device__ __forceinline__ LogitsRow(const float* logits, int vocab, u32 row = blockIdx.x)
        : at(logits + static_cast<i64>(row) * vocab),
          vocab(vocab),
          aligned(vocab % 4 == 0 && is_aligned_16(logits)) {}

    __device__ __forceinline__ int num_groups() const { return (vocab + 3) / 4; }

    // Tokens 4 g .. 4 g + 3; -inf past the end of the row.
    __device__ __forceinline__ Vec<float> group(int g) const {
        if (aligned) return load_vec(at + 4 * g);
        Vec<float> tokens;
#pragma unroll
        for (int j = 0; j < 4; j++) tokens.at[j] = 4 * g + j < vocab ? at[4 * g + j] : -positive_infinity();
        return tokens;
    }

    // `to`: a row of an array aligned to 16 bytes.
    __device__ __forceinline__ void store(float* to, int g, const Vec<float>& tokens) const {
        if (aligned) {
            store_vec(to + 4 * g, tokens);
        } else {
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (4 * g + j < vocab) to[4 * g + j] = tokens.at[j];
        }
    }

    // Calls visit(g, tokens) once per group, across NUM_SHARES blocks of which this is `share`; UNROLL loads in flight.
    template <int UNROLL, int NUM_SHARES = 1, typename Visit>
    __device__ __forceinline__ void for_each_group(Visit visit, int share = 0) const {
        constexpr int STRIDE = NUM_SHARES * LOGITS_THREADS;
        const int end = num_groups();
        for (int first = share * LOGITS_THREADS + threadIdx.x; first < end; first += UNROLL * STRIDE) {
            Vec<float> tokens[UNROLL];
#pragma unroll
            for (int n = 0; n < UNROLL; n++)
                if (first + n * STRIDE < end) tokens[n] = group(first + n * STRIDE);
#pragma unroll
            for (int n = 0; n < UNROLL; n++)
                if (first + n * STRIDE < end) visit(first + n * STRIDE, tokens[n]);
        }
    }
};

// Sorts like the float; zeros are equal, NaN is greatest.
__device__ __forceinline__ u32 ordered(float x) {
    const u32 bits = __float_as_uint(x + 0.0f);
    if (x != x) return 0xffffffffu;
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float unordered(u32 key) {
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// Greater for a greater value, then for a lower id; never 0.
__device__ __forceinline__ u64 token_key(float value, int id) {
    return static_cast<u64>(ordered(value)) << 32 | static_cast<u32>(~id);
}
__device__ __forceinline__ float value_of(u64 key) { return unordered(static_cast<u32>(key >> 32)); }
__device__ __forceinline__ int id_of(u64 key) { return static_cast<int>(~static_cast<u32>(key)); }

__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) < positive_infinity(); }

// Part of a row: sum of exp(x - maximum).
struct SumExp {
    float maximum;
    float sum;

    __device__ __forceinline__ void add(const Vec<float>& x) {
        const float highest = fmaxf(fmaxf(x.at[0], x.at[1]), fmaxf(x.at[2], x.at[3]));
        if (highest == -positive_infinity()) return;
        if (highest > maximum) {
            sum *= expf(maximum - highest);
            maximum = highest;
        }
#pragma unroll
        for (int j = 0; j < 4; j++) sum += expf(x.at[j] - maximum);
    }

    // Log of the whole row's sum. Called by the whole block.
    __device__ __forceinline__ float log_of_row(float row_maximum) const {
        const float scale = sum == 0.0f ? 0.0f : expf(maximum - row_maximum);
        return logf(block_sum(sum * scale));
    }
};
