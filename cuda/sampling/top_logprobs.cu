// top_logprobs: log-probabilities of a given token and of the K best, in each row of logits.
//
//   logits float32 [R, V], token_ids int32 [R] -> chosen float32 [R], top_ids int32 [R, K], top float32 [R, K]
//   Best first, ties by lower id; 0 <= K <= V; NaN for a row with NaN or no finite logit
//   normalized: logits are log-probabilities
//   grid (R), block (1024)
//   reference: NumpyOps.top_logprobs; roofline: R V floats read once, then K load latencies
#include "common/logits.cuh"

__device__ __forceinline__ u64 best_of_group(int g, const Vec<float>& tokens, int vocab, u64 below) {
    u64 best = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const u64 key = token_key(tokens.at[j], 4 * g + j);
        if (4 * g + j < vocab && key < below && key > best) best = key;
    }
    return best;
}

extern "C" __global__ void __launch_bounds__(LOGITS_THREADS)
    top_logprobs(const float* logits, const int* token_ids, float* chosen, int* top_ids, float* top, int vocab,
                 int num_best, int normalized) {
    const LogitsRow row(logits, vocab);
    SumExp part = {-positive_infinity(), 0.0f};
    u64 mine = 0;  // the best of this thread's tokens not yet in the result
    row.for_each_group<4>([&](int g, const Vec<float>& tokens) {
        part.add(tokens);
        mine = max(mine, best_of_group(g, tokens, vocab, ~0ull));
    });
    float maximum = 0.0f, log_sum = 0.0f;
    if (!normalized) {
        maximum = block_max(part.maximum, -positive_infinity());
        log_sum = part.log_of_row(maximum);
    }

    if (threadIdx.x == 0) {
        const int id = token_ids[blockIdx.x];
        const bool known = id >= 0 && id < vocab;
        chosen[blockIdx.x] = known ? row.at[id] - maximum - log_sum : -positive_infinity();
    }
    for (int k = 0; k < num_best; k++) {
        const u64 best = block_max(mine, 0ull);
        if (threadIdx.x == 0) {
            top_ids[static_cast<i64>(blockIdx.x) * num_best + k] = id_of(best);
            top[static_cast<i64>(blockIdx.x) * num_best + k] = value_of(best) - maximum - log_sum;
        }
        // The owner's warp searches the owner's groups for its next best.
        const int owner = id_of(best) / 4 % LOGITS_THREADS;
        if (threadIdx.x / WARP_SIZE == owner / WARP_SIZE) {
            const int lane = threadIdx.x % WARP_SIZE;
            u64 next = 0;
            for (int g = owner + lane * LOGITS_THREADS; g < row.num_groups(); g += WARP_SIZE * LOGITS_THREADS)
                next = max(next, best_of_group(g, row.group(g), vocab, best));
            next = warp_max(next);
            if (threadIdx.x == owner) mine = next;
        }
    }
}
