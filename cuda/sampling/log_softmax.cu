// log_softmax: log-probabilities of rows of logits; NaN for a row with NaN or without a finite logit.
//
//   logits, logprobs float32 [R, V]
//   grid (R), block (1024)
//   reference: log_softmax of numpy_sampling; roofline: R V floats read, mostly twice through L2, and written
#include "common/logits.cuh"

extern "C" __global__ void __launch_bounds__(LOGITS_THREADS)
    log_softmax(const float* logits, float* logprobs, int vocab) {
    const LogitsRow row(logits, vocab);
    SumExp part = {-positive_infinity(), 0.0f};
    row.for_each_group<4>([&](int, const Vec<float>& tokens) { part.add(tokens); });
    const float maximum = block_max(part.maximum, -positive_infinity());
    const float log_sum = part.log_of_row(maximum);

    float* to = logprobs + static_cast<i64>(blockIdx.x) * vocab;
    row.for_each_group<4>([&](int g, const Vec<float>& tokens) {
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (4 * g + j < vocab) to[4 * g + j] = tokens.at[j] - maximum - log_sum;
    });
}
