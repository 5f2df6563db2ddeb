// apply_penalties: adds biases to a copy of the logits, then applies repetition, frequency and presence penalties.
//
//   logits, adjusted float32 [R, V] of tokens 0.., with IS_PART first_token..; adjusted aligned to 16 bytes
//   bias_indptr int32 [R + 1] or null, bias_ids int32 [N], bias_values float32 [N]
//   seen_indptr int32 [R + 1] or null, seen_ids int32 [M] unique in a row, output_counts int32 [M] (0: prompt only);
//   repetition, presence, frequency float32 [R]
//   grid (R), block (1024)
//   reference: add_bias, penalise of numpy_sampling
//   Ignores ids outside 0..V-1. Biases of one token are added in no fixed order.
//   roofline: 2 R V floats; copy bandwidth from R = 132
#include "common/logits.cuh"

#ifndef IS_PART
#define IS_PART 0
#endif
#if IS_PART
#define FIRST_TOKEN , int first_token
#else
#define FIRST_TOKEN
constexpr int first_token = 0;
#endif

// In double, as NumPy computes it.
__device__ __forceinline__ float penalised(float logit, float repetition, float presence, float frequency, int count) {
    const float repeated = logit > 0.0f ? __fdiv_rn(logit, repetition) : __fmul_rn(logit, repetition);
    const double taken = static_cast<double>(frequency) * count + (count > 0 ? static_cast<double>(presence) : 0.0);
    return static_cast<float>(static_cast<double>(repeated) - taken);
}

extern "C" __global__ void __launch_bounds__(LOGITS_THREADS)
    apply_penalties(const float* logits, float* adjusted, const int* bias_indptr, const int* bias_ids,
                    const float* bias_values, const int* seen_indptr, const int* seen_ids, const int* output_counts,
                    const float* repetition, const float* presence, const float* frequency, int vocab FIRST_TOKEN) {
    const int r = blockIdx.x;
    float* to = adjusted + static_cast<i64>(r) * vocab;
    const LogitsRow row(logits, vocab);
    row.for_each_group<4>([&](int g, const Vec<float>& tokens) { row.store(to, g, tokens); });
    __syncthreads();

    if (bias_indptr != nullptr) {
        for (int n = bias_indptr[r] + threadIdx.x; n < bias_indptr[r + 1]; n += blockDim.x) {
            const int id = bias_ids[n] - first_token;
            if (id >= 0 && id < vocab) atomicAdd(to + id, bias_values[n]);
        }
        __syncthreads();
    }
    if (seen_indptr != nullptr) {
        for (int n = seen_indptr[r] + threadIdx.x; n < seen_indptr[r + 1]; n += blockDim.x) {
            const int id = seen_ids[n] - first_token;
            if (id >= 0 && id < vocab)
                to[id] = penalised(to[id], repetition[r], presence[r], frequency[r], output_counts[n]);
        }
    }
}
