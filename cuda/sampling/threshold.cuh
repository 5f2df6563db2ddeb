// Top-k and top-p by selection, without a sort: the greatest distance below the best logit that is kept.
//
// Distances are e = best - x >= 0 with x = logit / temperature; their bits order as their values. Histograms narrow a
// range of distances: 2048 equal bins over the window, then 2048 parts of the bin that reaches the target, until one
// token or one value is left. Sums are of integers: the result does not depend on the order of threads.
#pragma once

#include "common/logits.cuh"

// Gumbel noise spans less than 19.5: a token farther below the best than the window never wins.
constexpr float WINDOW = 32.0f;
constexpr int NUM_BINS = 2048;
constexpr float BINS_PER_UNIT = NUM_BINS / WINDOW;
constexpr float LAST_DISTANCE = 0x1.fffffep+4f;  // the greatest float below WINDOW
constexpr float LOSS_UNIT = 0x1p-19f;

// The measure of a token: 1 (top-k) or exp(-e) (top-p).
enum class Measure { COUNT, MASS };

// Weights lie within a bin of [1 - 1/64, 1] times the weight at its near edge; what they lack of it is counted in
// LOSS_UNIT, which 2^19 tokens in one bin do not overflow.
struct Histogram {
    u32 count[NUM_BINS];
    u32 loss[NUM_BINS];
};

struct Boundary {
    int bin;        // NUM_BINS: there is none
    u32 count;      // tokens in it
    double before;  // measure of the bins before it
};

// Distances of a row's tokens from its best.
struct Distances {
    const LogitsRow& row;
    float best;         // of logit / temperature
    float temperature;

    __device__ __forceinline__ float scaled(float logit) const { return __fdiv_rn(logit, temperature); }
    __device__ __forceinline__ float of(float logit) const { return best - scaled(logit); }
};

__device__ __forceinline__ int window_bin(float e) { return static_cast<int>(e * BINS_PER_UNIT); }

// 1 - exp(-within) for 0 <= within < 1/64.
__device__ __forceinline__ float loss_of(float within) {
    return within * (1.0f - within * (0.5f - within * (1.0f / 6.0f - within * (1.0f / 24.0f))));
}

// Counts the tokens whose distance has bits in [low, high], in bins of 2^shift values; with WHOLE_WINDOW in the equal
// bins of the window.
constexpr int WHOLE_WINDOW = -1;

template <Measure MEASURE>
__device__ __forceinline__ void fill(Histogram& histogram, const Distances& distances, u32 low, u32 high, int shift) {
    __syncthreads();  // readers of the previous level are done
    for (int n = threadIdx.x; n < NUM_BINS; n += LOGITS_THREADS) histogram.count[n] = histogram.loss[n] = 0;
    __syncthreads();
    distances.row.for_each_group<4>([&](int, const Vec<float>& tokens) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float e = distances.of(tokens.at[j]);
            const u32 bits = __float_as_uint(e);
            if (bits < low || bits > high) continue;
            const int bin = shift == WHOLE_WINDOW ? window_bin(e) : (bits - low) >> shift;
            atomicAdd(&histogram.count[bin], 1u);
            if (MEASURE == Measure::MASS) {
                const float within = e - window_bin(e) / BINS_PER_UNIT;
                atomicAdd(&histogram.loss[bin], static_cast<u32>(loss_of(within) / LOSS_UNIT + 0.5f));
            }
        }
    });
    __syncthreads();
}

// near_edge: the distance that the bin's losses are counted from, in bins of the window.
template <Measure MEASURE>
__device__ __forceinline__ double measure_of(const Histogram& histogram, int bin, int near_edge) {
    if (MEASURE == Measure::COUNT) return histogram.count[bin];
    const double kept = histogram.count[bin] - static_cast<double>(histogram.loss[bin]) * LOSS_UNIT;
    return kept * exp(-near_edge / static_cast<double>(BINS_PER_UNIT));
}

// The first bin with which the measure, summed from bin 0 on, reaches `wanted`. For a mass over the whole window
// `wanted` is a share of that mass on entry and a mass on return.
template <Measure MEASURE>
__device__ __forceinline__ Boundary find(const Histogram& histogram, double& wanted, int shift, int near_edge) {
    __shared__ Boundary found;
    constexpr int OWN = NUM_BINS / LOGITS_THREADS;
    double own[OWN], sum = 0.0;
#pragma unroll
    for (int n = 0; n < OWN; n++) {
        const int bin = threadIdx.x * OWN + n;
        own[n] = measure_of<MEASURE>(histogram, bin, shift == WHOLE_WINDOW ? bin : near_edge);
        sum += own[n];
    }
    double total;
    double before = block_scan(sum, &total) - sum;
    if (MEASURE == Measure::MASS && shift == WHOLE_WINDOW) wanted *= total;

    int reached = NUM_BINS;
    double before_reached = 0.0;
#pragma unroll
    for (int n = 0; n < OWN; n++) {
        if (reached == NUM_BINS && before + own[n] >= wanted) {
            reached = threadIdx.x * OWN + n;
            before_reached = before;
        }
        before += own[n];
    }
    const int bin = -block_max(-reached, -NUM_BINS);
    if (bin == NUM_BINS) return {NUM_BINS, 0, total};
    if (reached == bin) found = {bin, histogram.count[bin], before_reached};
    __syncthreads();
    return found;
}

// The greatest distance to keep so that the tokens kept reach `wanted` (a count, or a share of the mass within `limit`)
// and no fewer do; tokens at that distance all stay. Never beyond `limit`. Every thread calls and gets the result.
template <Measure MEASURE>
__device__ __forceinline__ float select(Histogram& histogram, const Distances& distances, float limit, double wanted) {
    u32 low = 0, high = __float_as_uint(limit);
    int shift = WHOLE_WINDOW, near_edge = 0;
    while (true) {
        fill<MEASURE>(histogram, distances, low, high, shift);
        const Boundary at = find<MEASURE>(histogram, wanted, shift, near_edge);
        if (at.bin == NUM_BINS) break;
        if (shift == WHOLE_WINDOW) {
            near_edge = at.bin;
            low = __float_as_uint(at.bin / BINS_PER_UNIT);
            high = min(high, __float_as_uint((at.bin + 1) / BINS_PER_UNIT) - 1);
        } else {
            low += static_cast<u32>(at.bin) << shift;
            high = min(high, low + (1u << shift) - 1);
        }
        if (at.count <= 1 || low >= high) break;
        wanted -= at.before;
        shift = max(0, 32 - __clz(high - low) - 11);  // 2^11 = NUM_BINS
    }
    return __uint_as_float(high);
}
