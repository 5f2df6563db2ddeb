// Top-k and top-p without a sort: the greatest distance below the best logit that is kept.
//
// Radix select: distances e = best - logit / temperature >= 0 sort like their bits. A histogram of 2048 bins over the
// window, then of 2048 parts of the bin that reaches the target, until one token or value is left. Integer sums: order
// does not matter.
#pragma once

#include "common/logits.cuh"

// Gumbel noise spans less than 19.5: a token below the window never wins.
constexpr float WINDOW = 32.0f;
constexpr int NUM_BINS = 2048;
constexpr float BINS_PER_UNIT = NUM_BINS / WINDOW;
constexpr float LAST_DISTANCE = 0x1.fffffep+4f;  // the greatest float below WINDOW
constexpr float LOSS_UNIT = 0x1p-19f;

// A token's measure: 1 (top-k) or exp(-e) (top-p).
enum class Measure { COUNT, MASS };

// A bin's weights are 1 - 1/64 to 1 times that at its near edge; losses in LOSS_UNIT do not overflow for 2^19 tokens.
struct Histogram {
    u32 count[NUM_BINS];
    u32 loss[NUM_BINS];
};

struct Boundary {
    int bin;  // NUM_BINS: none
    u32 count;
    double before;  // measure of the bins before it
};

struct Distances {
    const LogitsRow& row;
    float best;  // of logit / temperature
    float temperature;

    __device__ __forceinline__ float scaled(float logit) const { return __fdiv_rn(logit, temperature); }
    __device__ __forceinline__ float of(float logit) const { return best - scaled(logit); }
};

__device__ __forceinline__ int window_bin(float e) { return static_cast<int>(e * BINS_PER_UNIT); }

// 1 - exp(-within) for 0 <= within < 1/64.
__device__ __forceinline__ float loss_of(float within) {
    return within * (1.0f - within * (0.5f - within * (1.0f / 6.0f - within * (1.0f / 24.0f))));
}

// Counts distances with bits low..high in bins of 2^shift values, or of the window (WHOLE_WINDOW).
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

// `near_edge`: where the bin's losses are counted from.
template <Measure MEASURE>
__device__ __forceinline__ double measure_of(const Histogram& histogram, int bin, int near_edge) {
    if (MEASURE == Measure::COUNT) return histogram.count[bin];
    const double kept = histogram.count[bin] - static_cast<double>(histogram.loss[bin]) * LOSS_UNIT;
    return kept * exp(-near_edge / static_cast<double>(BINS_PER_UNIT));
}

// First bin at which the cumulative measure reaches `wanted`; over the whole window a share on entry, a mass on return.
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

// Least distance up to `limit` that keeps `wanted` (a count or a share of mass) and ties. Called by the whole block.
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
