// sample_part: the best token of a vocabulary shard, by temperature and Gumbel noise.
//
//   logits float32 [R, V] of tokens first_token..; temperature float32 [R]; seed uint64 [R]; position, branch
//   uint32 [R] -> token_ids int32 [R], scores, ties float32 [R]
//   grid (R), block (1024)
//   reference: sample_part of numpy_sampling; roofline: two reads of the part; not measured
#include "common/philox.cuh"
#include "sampling/threshold.cuh"

__device__ __forceinline__ PhiloxWords words_from(int first, u32 position, u32 branch, u64 seed) {
    if (first % 4 == 0) return philox_words(first / 4, position, branch, seed);
    PhiloxWords words;
#pragma unroll
    for (int j = 0; j < 4; j++)
        words.at[j] = philox_words((first + j) / 4, position, branch, seed).at[(first + j) % 4];
    return words;
}

__device__ __forceinline__ u64 noisy_best(const Distances& distances, int first_token, u64 seed, u32 position,
                                          u32 branch) {
    // As in sample_tokens.
    const float slack = 1e-5f * fmaxf(1.0f, fabsf(distances.best));
    const float limit = GUMBEL_HIGHEST - GUMBEL_LOWEST + slack;
    u64 best = 0;
    float best_score = -positive_infinity();
    distances.row.for_each_group<2>([&](int g, const Vec<float>& tokens) {
        bool any = false;
#pragma unroll
        for (int j = 0; j < 4; j++) any |= distances.of(tokens.at[j]) <= limit;
        if (!any) return;
        const PhiloxWords words = words_from(first_token + 4 * g, position, branch, seed);
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
    return block_max(best, 0ull);
}

extern "C" __global__ void __launch_bounds__(LOGITS_THREADS)
    sample_part(const float* logits, const float* temperature, const u64* seed, const u32* position, const u32* branch,
                int* token_ids, float* scores, float* ties, int vocab, int first_token) {
    const LogitsRow row(logits, vocab);
    const int r = blockIdx.x;

    u64 best = 0;
    row.for_each_group<4>([&](int g, const Vec<float>& tokens) {
#pragma unroll
        for (int j = 0; j < 4; j++) best = max(best, token_key(tokens.at[j], 4 * g + j));
    });
    best = block_max(best, 0ull);

    const float highest = value_of(best);
    const Distances distances = {row, highest / temperature[r], temperature[r]};
    const bool is_drawn = is_finite(distances.best);
    int token = id_of(best);
    float score = temperature[r] == 0.0f ? 0.0f : distances.best;
    if (is_drawn) {
        const u64 drawn = noisy_best(distances, first_token, seed[r], position[r], branch[r]);
        token = id_of(drawn);
        score = value_of(drawn);
    }
    if (highest == -positive_infinity()) score = highest;
    if (!(highest < positive_infinity())) score = __int_as_float(0x7fffffff);  // NaN
    if (threadIdx.x == 0) {
        token_ids[r] = first_token + token;
        scores[r] = score;
        ties[r] = is_drawn ? 0.0f : highest;
    }
}
