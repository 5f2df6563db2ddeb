// Split-KV prefill: few pieces of work with many keys are cut along these, a part for each CTA, and the CTAs that have
// worked on one piece put its rows together again, each a share of them.
//
// A part is a softmax sum relative to its own maximum; adding parts means weighing each by 2^(its maximum - the
// largest). They wait for each other, which is safe as long as all CTAs of a launch come to run at once: there is one
// an SM, and each has one part. Two processes that share the SMs of one device through MPS could each hold half of
// them and wait for ever; by turns, which is what devices do without MPS, they cannot.
#pragma once

#include "attention/attention.cuh"
#include "attention/prefill_rows.cuh"
#include "attention/prefill_work.cuh"
#include "common/types.cuh"
#include "common/wgmma.cuh"

constexpr int MAX_PARTS = 1024;  // of a launch, and so CTAs

// Parts that have left their rows, by piece. atomicInc wraps each to 0 with the last of them.
__device__ u32 parts_left[MAX_PARTS];

// Where the parts of a launch meet: sums float32[num_ctas, PADDED_ROWS, HEAD_DIM] and for each row its maximum, in
// units of log2, and its total.
struct Meeting {
    float* sums;
    float2* stats;

    // This thread's two rows of a part.
    __device__ __forceinline__ void leave(const Rows& rows, const Work& work, const Part& part, int first_row,
                                          float scale_log2) const {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float total = sum_of_four(rows.total[h]);
            const int row = first_row + 8 * h;
            if (!work.holds(row)) continue;
            const i64 at = static_cast<i64>(part.ticket) * PADDED_ROWS + row;
            float* to = sums + at * HEAD_DIM + threadIdx.x % 4 * 2;
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 8; ++i)
                *reinterpret_cast<float2*>(to + 8 * i) =
                    make_float2(rows.sum[4 * i + 2 * h], rows.sum[4 * i + 2 * h + 1]);
            if (threadIdx.x % 4 == 0) stats[at] = make_float2(rows.maximum[h] * scale_log2, total);
        }
    }

    // Every one of `num_threads` that left rows calls: when it returns, all parts of the piece are there to be read.
    __device__ __forceinline__ void wait_for_others(const Part& part, int barrier, int num_threads) const {
        __threadfence();
        meet(barrier, num_threads);
        if (threadIdx.x == WARPGROUP_SIZE) {  // the first of them
            u32* counter = &parts_left[part.piece()];
            const u32 last = part.count - 1;
            if (atomicInc(counter, last) != last)
                while (*static_cast<volatile u32*>(counter) != 0) __nanosleep(20);
            __threadfence();
        }
        meet(barrier, num_threads);
    }

    // This part's share of the piece's rows, a row a warp.
    __device__ __forceinline__ void combine(T* out, const Work& work, const Part& part, int warp, int num_warps,
                                            int num_kv_heads) const {
        const int lane = threadIdx.x % WARP_SIZE;
        for (int row = part.index + warp * part.count; work.holds(row); row += num_warps * part.count) {
            const auto at = [&](int index) {
                return static_cast<i64>(part.piece() + index * part.num_pieces) * PADDED_ROWS + row;
            };
            float maximum = minus_infinity(), total = 0.0f, sum[HEAD_DIM / WARP_SIZE] = {};
            for (int i = lane; i < part.count; i += WARP_SIZE) maximum = fmaxf(maximum, __ldcg(stats + at(i)).x);
            const float base = finite_base(warp_max(maximum));
#pragma unroll 4
            for (int i = 0; i < part.count; ++i) {
                const float2 stat = __ldcg(stats + at(i));
                const float weight = exp2_approx(stat.x - base);
                total += weight * stat.y;
#pragma unroll
                for (int j = 0; j < HEAD_DIM / WARP_SIZE; ++j)
                    sum[j] += weight * __ldcg(sums + at(i) * HEAD_DIM + lane + j * WARP_SIZE);
            }
            const float scale = reciprocal_or_zero(total);
            T* to = out + work.head(row, num_kv_heads) * HEAD_DIM + lane;
#pragma unroll
            for (int j = 0; j < HEAD_DIM / WARP_SIZE; ++j) to[j * WARP_SIZE] = from_float<T>(sum[j] * scale);
        }
    }
};
