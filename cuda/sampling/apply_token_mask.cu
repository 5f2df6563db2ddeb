// apply_token_mask: sets logits of tokens that a grammar forbids to -inf.
//
//   logits, adjusted float32 [R, V], may be one array, aligned to 16 bytes
//   mask_rows int32 [R]: row of `words`, no mask outside 0..M-1; words uint32 [M, W]: bit i % 32 of word i / 32 allows
//   token i; tokens from 32 W on are forbidden
//   grid (R, ceil(V / 4096)), block (256)
//   reference: forbid of numpy_sampling; roofline: 2 R V floats; copy bandwidth
#include "common/logits.cuh"

constexpr int MASK_THREADS = 256;
constexpr int GROUPS_PER_THREAD = 4;

extern "C" __global__ void __launch_bounds__(MASK_THREADS)
    apply_token_mask(const float* logits, float* adjusted, const int* mask_rows, const u32* words, int num_masks,
                     int num_words, int vocab) {
    const LogitsRow row(logits, vocab);
    float* to = adjusted + static_cast<i64>(blockIdx.x) * vocab;
    const int m = mask_rows[blockIdx.x];
    const bool is_masked = m >= 0 && m < num_masks;
    if (!is_masked && to == row.at) return;
    const u32* mask = words + static_cast<i64>(is_masked ? m : 0) * num_words;

#pragma unroll
    for (int n = 0; n < GROUPS_PER_THREAD; n++) {
        const int g = (blockIdx.y * GROUPS_PER_THREAD + n) * MASK_THREADS + threadIdx.x;
        if (g >= row.num_groups()) return;
        Vec<float> tokens = row.group(g);
        if (is_masked) {
            const u32 allowed = g / 8 < num_words ? mask[g / 8] >> (4 * (g % 8)) : 0u;
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (!(allowed >> j & 1u)) tokens.at[j] = -positive_infinity();
        }
        row.store(to, g, tokens);
    }
}
