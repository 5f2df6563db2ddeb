// sample_tokens: samples a token per row: temperature, top-k, top-p, min-p, Gumbel noise.
//
//   logits float32 [R, V], V <= 2^19; temperature, top_p, min_p float32 [R]; top_k int32 [R]; seed uint64 [R]
//   position, branch uint32 [R] -> token_ids int32 [R], is_nan bool [R]
//   grid (R), block (1024); SHARES, on Hopper: grid (SHARES, R), a cluster finds a row's best token
//   reference: sample of numpy_sampling, philox.py
//   roofline: reads of the row: one if greedy, two without filters, two or three more for top-k and top-p each; copy
//   bandwidth from R = 132
#include "common/philox.cuh"
#include "sampling/threshold.cuh"

#ifndef SHARES
#define SHARES 1
#endif
#if SHARES > 1
#include "common/wgmma.cuh"

// The cluster's best token, in its first block; the others end.
__device__ __forceinline__ u64 best_of_cluster(u64 best) {
    __shared__ u64 received[SHARES];
    wait_for_cluster();  // the first block has begun
    if (threadIdx.x == 0)
        asm volatile("st.shared::cluster.u64 [%0], %1;"
                     :
                     : "r"(address_in(0, shared_address(&received[blockIdx.x]))), "l"(best)
                     : "memory");
    asm volatile("barrier.cluster.arrive.release.aligned;" : : : "memory");
    wait_for_cluster();
    if (blockIdx.x != 0) return 0;
#pragma unroll
    for (int n = 0; n < SHARES; n++) best = max(best, received[n]);
    return best;
}
#endif

// The greatest distance e with exp(-e) >= min_p, to a few rounding steps.
__device__ __forceinline__ float min_p_distance(float min_p) {
    if (min_p <= 0.0f) return LAST_DISTANCE;
    const double least = fmin(static_cast<double>(min_p), 1.0);
    u32 bits = __float_as_uint(fabsf(static_cast<float>(-log(least))));
    for (int n = 0; n < 4 && exp(-static_cast<double>(__uint_as_float(bits + 1))) >= least; n++) bits++;
    for (int n = 0; n < 4 && bits > 0 && exp(-static_cast<double>(__uint_as_float(bits))) < least; n++) bits--;
    return fminf(__uint_as_float(bits), LAST_DISTANCE);
}

__device__ __forceinline__ float kept_distance(Histogram& histogram, const Distances& distances, int top_k, float top_p,
                                               float min_p) {
    float limit = LAST_DISTANCE;
    if (top_k < distances.row.vocab) limit = select<Measure::COUNT>(histogram, distances, limit, max(top_k, 1));
    if (top_p < 1.0f) limit = select<Measure::MASS>(histogram, distances, limit, top_p);
    return fminf(limit, min_p_distance(min_p));
}

// The kept token with the greatest logit / temperature + noise.
__device__ __forceinline__ int noisy_argmax(const Distances& distances, float limit, u64 seed, u32 position,
                                            u32 branch) {
    // A token farther below the best loses with any noise. Exact noise is computed only near this thread's best score;
    // the slack covers rounding, which grows with the logits.
    const float slack = 1e-5f * fmaxf(1.0f, fabsf(distances.best));
    limit = fminf(limit, GUMBEL_HIGHEST - GUMBEL_LOWEST + slack);
    u64 best = 0;
    float best_score = -positive_infinity();
    distances.row.for_each_group<2>([&](int g, const Vec<float>& tokens) {
        bool any = false;
#pragma unroll
        for (int j = 0; j < 4; j++) any |= distances.of(tokens.at[j]) <= limit;
        if (!any) return;
        const PhiloxWords words = philox_words(g, position, branch, seed);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float scaled = distances.scaled(tokens.at[j]);
            if (!(distances.best - scaled <= limit)) continue;
            if (scaled + gumbel_fast(words.at[j]) < best_score - slack) continue;
            const float score = scaled + gumbel_exact(words.at[j]);
            best = max(best, token_key(score, 4 * g + j));
            best_score = fmaxf(best_score, score);
        }
    });
    return id_of(block_max(best, 0ull));
}

extern "C" __global__ void __launch_bounds__(LOGITS_THREADS)
    sample_tokens(const float* logits, const float* temperature, const int* top_k, const float* top_p,
                  const float* min_p, const u64* seed, const u32* position, const u32* branch, int* token_ids,
                  bool* is_nan, int vocab) {
    __shared__ Histogram histogram;
    const int r = SHARES > 1 ? blockIdx.y : blockIdx.x;
    const LogitsRow row(logits, vocab, r);
#if SHARES > 1
    arrive_at_cluster();
#endif

    u64 best = 0;
    row.for_each_group<4, SHARES>(
        [&](int g, const Vec<float>& tokens) {
#pragma unroll
            for (int j = 0; j < 4; j++) best = max(best, token_key(tokens.at[j], 4 * g + j));
        },
        SHARES > 1 ? blockIdx.x : 0);
    best = block_max(best, 0ull);
#if SHARES > 1
    best = best_of_cluster(best);
    if (blockIdx.x != 0) return;
#endif
    const bool has_best = is_finite(value_of(best));

    int token = has_best ? id_of(best) : 0;
    const Distances distances = {row, value_of(best) / temperature[r], temperature[r]};
    // At a temperature of 0, or so small that the quotient overflows, the best token wins.
    if (has_best && temperature[r] > 0.0f && is_finite(distances.best)) {
        const float limit = kept_distance(histogram, distances, top_k[r], top_p[r], min_p[r]);
        token = noisy_argmax(distances, limit, seed[r], position[r], branch[r]);
    }
    if (threadIdx.x == 0) {
        token_ids[r] = token;
        is_nan[r] = !has_best;
    }
}
