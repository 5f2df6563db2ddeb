// plan_decode_attention: cuts the sequences of a batch into parts of about equal work, once for all layers of a step. On
// the device, so that a captured graph serves every mix of lengths.
//
//   context_lens int32[S] -> parts Part[num_slots]: those of sequence 0, then of sequence 1, ... A sequence much longer
//   than a block's fair share is cut; one that sees nothing still has a part. Slots behind the last part name
//   sequence S.
//   A build defines WARPS (of paged_decode_attention), MIN_PART and MAX_SPLITS.
//   grid (1), block (1024)
//   twin: NumpyOps.plan_decode_attention
//   needs: num_slots at least S, and S + 2 * num_shares where num_shares is not 0; 0 leaves all sequences whole
//   roofline: none; a few kilobytes, it should cost a launch and a few loads. Each block of paged_decode_attention would
//   otherwise do the same: 66 us a layer at 512 short sequences on an H200.
#include "decode_parts.cuh"

constexpr int THREADS = 1024;

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

// What a sequence shows of its context.
struct Seen {
    int first, origin, end;  // first token seen, the tile it lies in, the context's end

    __device__ __forceinline__ Seen(int context_len, int max_tokens, int window) {
        end = max(0, min(context_len, max_tokens));
        first = max(0, end - window);
        origin = first / TILE * TILE;
    }
    __device__ __forceinline__ int span() const { return end - origin; }
};

// How large parts are.
struct Share {
    int tokens;     // that one part should have
    int threshold;  // tokens up to which a sequence stays whole

    __device__ __forceinline__ Share(int total, int longest, int num_sequences, int num_shares) {
        const int fair = num_shares > 0 ? ceil_div(total, num_shares) : total;
        const bool is_even = static_cast<i64>(longest) * num_sequences <= total + total / 8;
        // Parts of uneven sequences come in no good order: smaller ones fill the gaps.
        tokens = max(MIN_PART, is_even ? fair : ceil_div(fair, 2));
        threshold = num_shares > 0 ? max(tokens, fair + fair / 8) : 0x7fffffff;
    }

    __device__ __forceinline__ int size_of_part(int span) const {
        if (span <= threshold) return max(span, 1);
        const int wanted = min(ceil_div(span, tokens), MAX_SPLITS - 1);
        return ceil_div(ceil_div(span, wanted), PART_STEP) * PART_STEP;
    }
};

// The parts of a sequence, by the lanes of a warp: every `stride`-th from `from` on.
__device__ __forceinline__ void write_parts(Part* parts, int sequence, const Seen& seen, int size, int count,
                                            int first_slot, int from, int stride) {
    for (int i = from; i < count; i += stride) {
        const int begin = seen.origin + i * size;
        parts[first_slot + i] = {sequence, seen.first, begin, min(begin + size, seen.end), count, first_slot, {}};
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    plan_decode_attention(Part* parts, const int* context_lens, int num_sequences, int num_slots, int num_shares,
                          int max_tokens, int window) {
    const int lane = threadIdx.x % WARP_SIZE;
    int total = 0, longest = 0;
    for (int s = threadIdx.x; s < num_sequences; s += THREADS) {
        const int span = Seen(context_lens[s], max_tokens, window).span();
        total += span;
        longest = max(longest, span);
    }
    total = block_sum(total);
    longest = block_max(longest, 0);
    const Share share(total, longest, num_sequences, num_shares);

    int num_parts = 0;
    for (int base = 0; base < num_sequences; base += THREADS) {
        const int sequence = base + threadIdx.x;
        const Seen seen(sequence < num_sequences ? context_lens[sequence] : 0, max_tokens, window);
        const int size = share.size_of_part(seen.span());
        const int count = sequence < num_sequences ? max(1, ceil_div(seen.span(), size)) : 0;
        int added;
        const int first_slot = num_parts + block_scan(count, &added) - count;
        num_parts += added;
        if (count == 1) write_parts(parts, sequence, seen, size, 1, first_slot, 0, 1);
        for (u32 cut = __ballot_sync(FULL_WARP, count > 1); cut != 0; cut &= cut - 1) {
            const int owner = __ffs(cut) - 1;
            Seen of_owner = seen;
            of_owner.first = __shfl_sync(FULL_WARP, seen.first, owner);
            of_owner.origin = __shfl_sync(FULL_WARP, seen.origin, owner);
            of_owner.end = __shfl_sync(FULL_WARP, seen.end, owner);
            write_parts(parts, sequence - lane + owner, of_owner, __shfl_sync(FULL_WARP, size, owner),
                        __shfl_sync(FULL_WARP, count, owner), __shfl_sync(FULL_WARP, first_slot, owner), lane,
                        WARP_SIZE);
        }
    }
    for (int slot = num_parts + threadIdx.x; slot < num_slots; slot += THREADS)
        parts[slot] = {num_sequences, 0, 0, 0, 0, 0, {}};
}
