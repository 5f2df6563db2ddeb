// The end of split-KV decode: warps' results become a part's, parts become the row. Both are softmax sums relative to
// their own maximum, so adding them means weighing each by 2^(its maximum - the largest).
//
// The parts of one sequence and kv head meet in global memory, and the CTA that comes last combines them: that saves
// the launch of a second kernel. A build defines WARPS, MEMBERS, MAX_SPLITS and SHARED_BYTES besides what attention.cuh
// needs.
#pragma once

#include "attention/attention.cuh"
#include "attention/decode_parts.cuh"
#include "common/types.cuh"

constexpr int THREADS = WARPS * WARP_SIZE;
constexpr int ROWS = QUIRE_DTYPE == 0 ? 1 : at_most(GROUP, 16);  // query rows of a CTA, all of one kv head
constexpr int SLICES = ceil_div(GROUP, ROWS);                    // CTAs that share a kv head
constexpr int GROUP_ROWS = MEMBERS * ROWS;                       // of a CTA that reads for a group of sequences
constexpr int SUM_STRIDE = HEAD_DIM + 4;                         // floats; the 4 spread the rows over the banks
constexpr int MAX_PAIRS = 1 << 14;                               // of sequence and blockIdx.x, that may be split

// Parts that have left their result, by sequence and blockIdx.x. atomicInc wraps each to 0 for the next launch.
__device__ u32 arrived[MAX_PAIRS];

// What the warps of a CTA leave for each other at the end, over the memory of the tiles.
template <int NUM_ROWS>
struct Results {
    float sum[WARPS][NUM_ROWS][SUM_STRIDE];
    float2 stats[WARPS][NUM_ROWS];  // running maximum, total
};
static_assert(SHARED_BYTES >= sizeof(Results<QUIRE_DTYPE == 0 ? ROWS : GROUP_ROWS>), "the warps' results must fit");
static_assert(SHARED_BYTES >= ROWS * 2 * MAX_SPLITS * sizeof(float), "the weights of the parts must fit");

// Four consecutive elements, rounded to T.
__device__ __forceinline__ void store_four(T* to, const float (&x)[4]) {
    struct alignas(4 * sizeof(T)) Four { T at[4]; } four;
#pragma unroll
    for (int i = 0; i < 4; ++i) four.at[i] = from_float<T>(x[i]);
    *reinterpret_cast<Four*>(to) = four;
}

// Adds the warps' results and gives each row that `place.holds` to it, four dimensions at a time.
template <int NUM_ROWS, typename Place>
__device__ __forceinline__ void merge_warps(const Results<NUM_ROWS>& results, const Place& place) {
    for (int i = threadIdx.x; i < NUM_ROWS * (HEAD_DIM / 4); i += THREADS) {
        const int row = i / (HEAD_DIM / 4), d = i % (HEAD_DIM / 4) * 4;
        if (!place.holds(row)) continue;
        float maximum = minus_infinity(), total = 0.0f, sum[4] = {};
#pragma unroll
        for (int w = 0; w < WARPS; ++w) maximum = fmaxf(maximum, results.stats[w][row].x);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float weight = exp2_approx(results.stats[w][row].x - finite_base(maximum));
            total += weight * results.stats[w][row].y;
#pragma unroll
            for (int j = 0; j < 4; ++j) sum[j] += weight * results.sum[w][row][d + j];
        }
        place.take(row, d, sum, maximum, total);
    }
}

// A whole row: it goes straight to the output.
struct InOutput {
    T* out;
    int num_rows;

    __device__ __forceinline__ bool holds(int row) const { return row < num_rows; }
    __device__ __forceinline__ void take(int row, int d, float (&sum)[4], float, float total) const {
        const float scale = reciprocal_or_zero(total);
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[j] *= scale;
        store_four(out + row * HEAD_DIM + d, sum);
    }
};

// One part of a row: it waits in the workspace for the others.
struct InWorkspace {
    float* sums;
    float2* stats;
    int num_rows;

    __device__ __forceinline__ bool holds(int row) const { return row < num_rows; }
    __device__ __forceinline__ void take(int row, int d, const float (&sum)[4], float maximum, float total) const {
        leave(row, d, sum, maximum, total);
    }
    __device__ __forceinline__ void leave(i64 row, int d, const float (&sum)[4], float maximum, float total) const {
        *reinterpret_cast<float4*>(sums + row * HEAD_DIM + d) = make_float4(sum[0], sum[1], sum[2], sum[3]);
        if (d == 0) stats[row] = make_float2(maximum, total);
    }
};

// True in every thread of the CTA that is the last of `count` to come here for this pair; it sees what they wrote.
__device__ __forceinline__ bool is_last_to_arrive(int pair, int count) {
    __threadfence();
    __syncthreads();
    const bool is_last = __syncthreads_or(threadIdx.x == 0 && atomicInc(&arrived[pair], count - 1) == count - 1);
    __threadfence();
    return is_last;
}

// The same for the members of a group: true in thread m where this CTA is the last to come here for member m. Every
// thread of the CTA calls; once they have met again, all of them see what the others wrote.
__device__ __forceinline__ bool completes_member(const Member* members, int num_members) {
    __threadfence();
    __syncthreads();
    bool is_last = false;
    if (threadIdx.x < num_members) {
        const Member member = members[threadIdx.x];
        u32* counter = &arrived[member.sequence * gridDim.x + blockIdx.x];
        is_last = atomicInc(counter, member.count - 1) == member.count - 1;
    }
    __threadfence();
    return is_last;
}

// out = the parts of each row, weighted by their shares of the softmax; from a part to the next are `stride` rows of
// the workspace. `weights` is shared float[ROWS][count].
__device__ __forceinline__ void combine_parts(const float* sums, const float2* stats, int num_rows, int count,
                                              int stride, float* weights, T* out) {
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    for (int row = warp; row < num_rows; row += WARPS) {
        const float2* parts = stats + row;
        float maximum = minus_infinity(), total = 0.0f;
        for (int i = lane; i < count; i += WARP_SIZE) maximum = fmaxf(maximum, __ldcg(parts + i * stride).x);
        const float base = finite_base(warp_max(maximum));
        for (int i = lane; i < count; i += WARP_SIZE) {
            const float2 part = __ldcg(parts + i * stride);
            const float weight = exp2_approx(part.x - base);
            weights[row * count + i] = weight;
            total += weight * part.y;
        }
        const float scale = reciprocal_or_zero(warp_sum(total));
        for (int i = lane; i < count; i += WARP_SIZE) weights[row * count + i] *= scale;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < num_rows * (HEAD_DIM / 4); i += THREADS) {
        const int row = i / (HEAD_DIM / 4), d = i % (HEAD_DIM / 4) * 4;
        const float* from = sums + row * HEAD_DIM + d;
        float sum[4] = {};
#pragma unroll 8
        for (int part = 0; part < count; ++part) {
            const float weight = weights[row * count + part];
            const float4 x = __ldcg(reinterpret_cast<const float4*>(from + static_cast<i64>(part) * stride * HEAD_DIM));
            sum[0] += weight * x.x, sum[1] += weight * x.y, sum[2] += weight * x.z, sum[3] += weight * x.w;
        }
        store_four(out + row * HEAD_DIM + d, sum);
    }
}
