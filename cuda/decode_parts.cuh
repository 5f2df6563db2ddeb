// How decode cuts the sequences of a batch into parts of about equal work, worked out by each block for itself from the
// contexts' lengths: a captured graph serves every mix of them.
//
// A part is what one block per kv head (and slice) reads. Blocks name parts by slot: the parts of sequence 0, then of
// sequence 1, ... A sequence much longer than a block's fair share is cut; one that sees nothing still has a part.
#pragma once

#include "attention.cuh"
#include "types.cuh"

constexpr int TILE = 16;                      // tokens of a warp's step
constexpr int PART_STEP = WARPS * WARP_SIZE;  // parts are multiples of it, so that every warp gets its share

struct Part {
    int sequence;    // behind the last one in a slot that stands for nothing
    int first;       // token that the window shows first
    int begin, end;  // tokens of this part; a multiple of TILE, and at most the context's end
    int count;       // parts of the sequence
    int first_slot;  // of the sequence's parts
};

// What the sequences see of their contexts, and how it is shared.
struct Parts {
    const int* context_lens;
    int num_sequences, max_tokens, window;
    int share;      // tokens that one part should have
    int threshold;  // tokens up to which a sequence stays whole

    // Every lane of a warp calls, and gets the same. `num_shares` parts of equal size would keep the device busy; 0
    // leaves all sequences whole.
    __device__ __forceinline__ Parts(const int* context_lens, int num_sequences, int max_tokens, int window,
                                     int num_shares)
        : context_lens(context_lens), num_sequences(num_sequences), max_tokens(max_tokens), window(window) {
        int total = 0, longest = 0;
        for (int s = threadIdx.x % WARP_SIZE; s < num_sequences; s += WARP_SIZE) {
            const int tokens = span(s);
            total += tokens;
            longest = max(longest, tokens);
        }
        total = warp_sum(total);
        longest = warp_max(longest);
        const int fair = num_shares > 0 ? ceil_div(total, num_shares) : total;
        const bool is_even = static_cast<i64>(longest) * num_sequences <= total + total / 8;
        // Parts of uneven sequences come in no good order: smaller ones fill the gaps.
        share = max(MIN_PART, is_even ? fair : ceil_div(fair, 2));
        threshold = num_shares > 0 ? max(share, fair + fair / 8) : max_tokens;
    }

    __device__ __forceinline__ int length(int sequence) const {
        return max(0, min(context_lens[sequence], max_tokens));
    }

    __device__ __forceinline__ static int first_seen(int length, int window) { return max(0, length - window); }

    // Tokens from the tile of the first that is seen to the end.
    __device__ __forceinline__ int span(int sequence) const {
        const int tokens = length(sequence);
        return tokens - first_seen(tokens, window) / TILE * TILE;
    }

    __device__ __forceinline__ int size(int span) const {
        if (span <= threshold) return max(span, 1);
        const int wanted = min(ceil_div(span, share), MAX_SPLITS - 1);
        return ceil_div(ceil_div(span, wanted), PART_STEP) * PART_STEP;
    }

    __device__ __forceinline__ int count(int span) const { return max(1, ceil_div(span, size(span))); }

    __device__ __forceinline__ Part part(int sequence, int first_slot, int slot) const {
        const int tokens = length(sequence), first = first_seen(tokens, window), origin = first / TILE * TILE;
        const int step = size(tokens - origin), begin = origin + (slot - first_slot) * step;
        return {sequence, first, begin, min(begin + step, tokens), count(tokens - origin), first_slot};
    }

    // The part of a slot, for every lane of a warp alike.
    __device__ __forceinline__ Part find(int slot) const {
        const int lane = threadIdx.x % WARP_SIZE;
        if (num_sequences == 1) {  // saves 0.3 us of the 8 that a context of 1k takes
            const Part only = part(0, 0, slot);
            return slot < only.count ? only : Part{num_sequences, 0, 0, 0, 0, 0};
        }
        int before = 0;
        for (int base = 0; base < num_sequences; base += WARP_SIZE) {
            const int parts = base + lane < num_sequences ? count(span(base + lane)) : 0;
            int end = parts;
#pragma unroll
            for (int offset = 1; offset < WARP_SIZE; offset *= 2) {
                const int left = __shfl_up_sync(FULL_WARP, end, offset);
                if (lane >= offset) end += left;
            }
            const u32 behind = __ballot_sync(FULL_WARP, before + end > slot);
            if (behind != 0) {
                const int owner = __ffs(behind) - 1;
                return part(base + owner, before + __shfl_sync(FULL_WARP, end - parts, owner), slot);
            }
            before += __shfl_sync(FULL_WARP, end, WARP_SIZE - 1);
        }
        return {num_sequences, 0, 0, 0, 0, 0};
    }
};
