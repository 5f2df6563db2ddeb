// Split sizes of the decode attention plans.
#pragma once

#include "attention/kv_split.cuh"

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

struct VisibleRange {
    int first, origin, end;  // own splits begin at `origin`, a multiple of TILE

    // `prefix`: common tokens, a multiple of TILE.
    __device__ __forceinline__ VisibleRange(int context_len, int max_tokens, int window, int prefix) {
        end = max(0, min(context_len, max_tokens));
        first = max(0, end - window);
        origin = max(prefix, first / TILE * TILE);
    }
    __device__ __forceinline__ int span() const { return end - origin; }
};

struct SplitSize {
    bool is_even;
    int tokens;  // target per split
    int threshold;  // longest unsplit span

    __device__ __forceinline__ SplitSize(int total, int longest, int num_sequences, int target_splits) {
        const int fair = target_splits > 0 ? ceil_div(total, target_splits) : total;
        is_even = static_cast<i64>(longest) * num_sequences <= total + total / 8;
        tokens = max(MIN_SPLIT, is_even ? fair : ceil_div(fair, 2));  // small splits fill the gaps
        threshold = target_splits == 0 ? 0x7fffffff : is_even ? max(tokens, fair + fair / 8) : tokens;
    }

    __device__ __forceinline__ int tokens_for(int span) const {
        if (span <= threshold) return max(span, 1);
        const int wanted = min(ceil_div(span, tokens), MAX_SPLITS - 1);
        return ceil_div(ceil_div(span, wanted), SPLIT_STEP) * SPLIT_STEP;
    }
};

struct SequenceSplits {
    int size, count;  // tokens per split except the last; splits

    __device__ __forceinline__ SequenceSplits(const SplitSize& split_size, int span) {
        size = split_size.tokens_for(span);
        count = max(1, ceil_div(span, size));
    }
    __device__ __forceinline__ int last_size(int span) const { return span - (count - 1) * size; }
};
