// The query rows of a warpgroup in prefill attention: scores of a tile of keys become weights, and the sums the output.
//
// A thread holds two rows of the 64, in the fragments of wgmma.cuh: element i of a score or sum belongs to half i / 2
// % 2, which is row 8 h + lane / 4 of its warp's 16, and to column i / 4 * 8 + lane % 4 * 2 + i % 2.
#pragma once

#include "common/mma.cuh"
#include "attention/prefill_work.cuh"
#include "common/types.cuh"

struct Rows {
    float sum[HEAD_DIM / 2];
    float maximum[2];  // of the raw scores
    float total[2];    // of this thread's own keys

    __device__ __forceinline__ Rows() {
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; ++i) sum[i] = 0.0f;
        maximum[0] = maximum[1] = minus_infinity();
        total[0] = total[1] = 0.0f;
    }
};

// Minus infinity for the keys that a row does not see; `behind` tells how far the tile's first key lies behind the last
// key that the rows see, `seen` how many keys they see up to that one.
__device__ __forceinline__ void mask_tile(float (&score)[KEYS / 2], const int (&behind)[2], const int (&seen)[2]) {
#pragma unroll
    for (int i = 0; i < KEYS / 2; ++i) {
        const int distance = behind[i / 2 % 2] - (i / 4 * 8 + i % 2) - threadIdx.x % 4 * 2;
        if (static_cast<u32>(distance) >= static_cast<u32>(seen[i / 2 % 2])) score[i] = minus_infinity();
    }
}

// Turns scores into weights 2^((score - maximum) * scale_log2); the row's sums are to be multiplied by `correction`, to
// fit the new maximum. Two chains a row, so that one step need not wait for the one before.
__device__ __forceinline__ void weigh_scores(Rows& rows, float (&correction)[2], float (&score)[KEYS / 2],
                                             float scale_log2) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float top[2] = {rows.maximum[h], rows.maximum[h]}, part[2] = {};
#pragma unroll
        for (int i = 2 * h; i < KEYS / 2; i += 4) {
            top[0] = fmaxf(top[0], score[i]);
            top[1] = fmaxf(top[1], score[i + 1]);
        }
        float best = fmaxf(top[0], top[1]);
        best = fmaxf(best, __shfl_xor_sync(FULL_WARP, best, 1));
        best = fmaxf(best, __shfl_xor_sync(FULL_WARP, best, 2));
        const float base = finite_base(best) * scale_log2;
        correction[h] = exp2_approx(rows.maximum[h] * scale_log2 - base);
        rows.maximum[h] = best;
#pragma unroll
        for (int i = 2 * h; i < KEYS / 2; i += 4) {
            score[i] = exp2_approx(fmaf(score[i], scale_log2, -base));
            score[i + 1] = exp2_approx(fmaf(score[i + 1], scale_log2, -base));
            part[0] += score[i];
            part[1] += score[i + 1];
        }
        rows.total[h] = fmaf(rows.total[h], correction[h], part[0] + part[1]);
    }
}

__device__ __forceinline__ void rescale_sums(Rows& rows, const float (&correction)[2]) {
    // Most tiles bring no new maximum to any row of the warp.
    if (!__any_sync(FULL_WARP, correction[0] != 1.0f || correction[1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) rows.sum[i] *= correction[i / 2 % 2];
}

// Both, where no product with values is under way.
__device__ __forceinline__ void weigh_tile(Rows& rows, float (&score)[KEYS / 2], float scale_log2) {
    float correction[2];
    weigh_scores(rows, correction, score, scale_log2);
    rescale_sums(rows, correction);
}

// To the operand that the product with the values takes from registers.
__device__ __forceinline__ void pack_weights(u32 (&weights)[KEYS / 16][4], const float (&score)[KEYS / 2]) {
#pragma unroll
    for (int i = 0; i < KEYS / 4; ++i) weights[i / 4][i % 4] = pack_pair(score[2 * i], score[2 * i + 1]);
}

// Lane t of four gets pair[t] of each, in the lanes' order: eight columns side by side.
__device__ __forceinline__ uint4 gather_pairs(const u32 (&pair)[4]) {
    const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
    const u32 low = __shfl_xor_sync(FULL_WARP, odd ? pair[0] : pair[1], 1);
    const u32 high = __shfl_xor_sync(FULL_WARP, odd ? pair[2] : pair[3], 1);
    const u32 near[4] = {odd ? low : pair[0], odd ? pair[1] : low, odd ? high : pair[2], odd ? pair[3] : high};
    const u32 first = __shfl_xor_sync(FULL_WARP, upper ? near[0] : near[2], 2);
    const u32 second = __shfl_xor_sync(FULL_WARP, upper ? near[1] : near[3], 2);
    return upper ? make_uint4(first, second, near[2], near[3]) : make_uint4(near[0], near[1], first, second);
}

// Of the lanes that hold one row.
__device__ __forceinline__ float sum_of_four(float x) {
    x += __shfl_xor_sync(FULL_WARP, x, 1);
    return x + __shfl_xor_sync(FULL_WARP, x, 2);
}

__device__ __forceinline__ void store_rows(const Rows& rows, T* out, const Work& work, int first_row,
                                           int num_kv_heads) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const float scale = reciprocal_or_zero(sum_of_four(rows.total[h]));
        const int row = first_row + 8 * h;
        T* to = out + work.head(row, num_kv_heads) * HEAD_DIM + threadIdx.x % 4 * 8;
        const bool is_mine = work.holds(row);
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 32; ++n) {
            u32 pair[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int at = 16 * n + 4 * i + 2 * h;
                pair[i] = pack_pair(rows.sum[at] * scale, rows.sum[at + 1] * scale);
            }
            const uint4 columns = gather_pairs(pair);
            if (is_mine) *reinterpret_cast<uint4*>(to + 32 * n) = columns;
        }
    }
}
