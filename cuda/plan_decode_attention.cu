// plan_decode_attention: cuts the sequences of a batch into parts of about equal work, once for all layers of a step. On
// the device, so that a captured graph serves every mix of lengths.
//
//   context_lens int32[S] -> parts Part[num_slots], in the order in which blocks take them: the longest first, so that
//   what is left at the end is short (one after the other without regard to that, the blocks of 128 chats are busy for
//   62 % of the time until the last has ended, and so for 89 %). A sequence much longer than a block's fair share is
//   cut; one that sees nothing still has a part. Behind the last part stand some of sequence S, for nothing.
//   A build defines WARPS (of paged_decode_attention), MIN_PART and MAX_SPLITS.
//   grid (1), block (1024)
//   twin: NumpyOps.plan_decode_attention
//   needs: num_slots at least S, and S + 2 * num_shares where num_shares is not 0; 0 leaves all sequences whole
//   roofline: none; a few kilobytes, it should cost a launch and a few loads. Each block of paged_decode_attention would
//   otherwise do the same: 66 us a layer at 512 short sequences on an H200.
#include "decode_parts.cuh"

constexpr int THREADS = 1024;
constexpr int CLASSES = WARP_SIZE;  // of parts, by size

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
    bool is_even;   // no sequence is much longer than the mean
    int tokens;     // that one part should have
    int threshold;  // tokens up to which a sequence stays whole

    __device__ __forceinline__ Share(int total, int longest, int num_sequences, int num_shares) {
        const int fair = num_shares > 0 ? ceil_div(total, num_shares) : total;
        is_even = static_cast<i64>(longest) * num_sequences <= total + total / 8;
        tokens = max(MIN_PART, is_even ? fair : ceil_div(fair, 2));  // small parts of uneven ones fill the gaps
        threshold = num_shares == 0 ? 0x7fffffff : is_even ? max(tokens, fair + fair / 8) : tokens;
    }

    __device__ __forceinline__ int size_of_part(int span) const {
        if (span <= threshold) return max(span, 1);
        const int wanted = min(ceil_div(span, tokens), MAX_SPLITS - 1);
        return ceil_div(ceil_div(span, wanted), PART_STEP) * PART_STEP;
    }
};

// How a sequence is cut.
struct Cut {
    int size, count;  // tokens of each part but the last; parts

    __device__ __forceinline__ Cut(const Share& share, int span) {
        size = share.size_of_part(span);
        count = max(1, ceil_div(span, size));
    }
    __device__ __forceinline__ int last_size(int span) const { return span - (count - 1) * size; }
};

// Where the parts of a sequence stand: those of full size side by side, and the last one.
struct Places {
    int full, last;
};

// Parts by classes of their size, the largest first; in a class, as they come.
struct Order {
    int* next;    // shared [CLASSES]: where the next part of a class goes
    int largest;  // tokens of a part

    __device__ __forceinline__ int* of(int tokens) const {
        const i64 from_below = static_cast<i64>(tokens) * CLASSES / (largest + 1);
        return next + CLASSES - 1 - min(static_cast<i64>(CLASSES - 1), from_below);
    }
    __device__ __forceinline__ void count(const Cut& cut, int span) const {
        if (cut.count > 1) atomicAdd(of(cut.size), cut.count - 1);
        atomicAdd(of(cut.last_size(span)), 1);
    }
    // By one warp: from how many there are of each class to where it begins.
    __device__ __forceinline__ void begin(int lane) const {
        const int mine = next[lane];
        int before = 0;
        for (int other = 0; other < CLASSES; other++) {
            const int count = __shfl_sync(FULL_WARP, mine, other);
            before += other < lane ? count : 0;
        }
        next[lane] = before;
    }
    __device__ __forceinline__ Places take(const Cut& cut, int span) const {
        const int full = cut.count > 1 ? atomicAdd(of(cut.size), cut.count - 1) : 0;
        return {full, atomicAdd(of(cut.last_size(span)), 1)};
    }
};

// The parts of a sequence, by the lanes of a warp: every `stride`-th from `from` on.
__device__ __forceinline__ void write_parts(Part* parts, int sequence, const Seen& seen, int size, int count,
                                            int first_slot, Places at, int from, int stride) {
    for (int i = from; i < count; i += stride) {
        const int begin = seen.origin + i * size, end = min(begin + size, seen.end);
        parts[i < count - 1 ? at.full + i : at.last] = {sequence, seen.first, begin, end, count, first_slot,
                                                        first_slot + i, 0};
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

    __shared__ int next[CLASSES];
    const Order order = {next, min(longest, share.threshold)};
    if (!share.is_even) {
        if (threadIdx.x < CLASSES) next[threadIdx.x] = 0;
        __syncthreads();
        for (int s = threadIdx.x; s < num_sequences; s += THREADS) {
            const int span = Seen(context_lens[s], max_tokens, window).span();
            order.count(Cut(share, span), span);
        }
        __syncthreads();
        if (threadIdx.x < WARP_SIZE) order.begin(lane);
        __syncthreads();
    }

    int num_parts = 0;
    for (int base = 0; base < num_sequences; base += THREADS) {
        const int sequence = base + threadIdx.x;
        const Seen seen(sequence < num_sequences ? context_lens[sequence] : 0, max_tokens, window);
        const Cut cut(share, seen.span());
        const int count = sequence < num_sequences ? cut.count : 0;
        int added;
        const int first_slot = num_parts + block_scan(count, &added) - count;
        num_parts += added;
        Places places = {first_slot, first_slot + count - 1};
        if (count > 0 && !share.is_even) places = order.take(cut, seen.span());
        if (count == 1) write_parts(parts, sequence, seen, cut.size, 1, first_slot, places, 0, 1);
        for (u32 several = __ballot_sync(FULL_WARP, count > 1); several != 0; several &= several - 1) {
            const int owner = __ffs(several) - 1;
            Seen of_owner = seen;
            of_owner.first = __shfl_sync(FULL_WARP, seen.first, owner);
            of_owner.origin = __shfl_sync(FULL_WARP, seen.origin, owner);
            of_owner.end = __shfl_sync(FULL_WARP, seen.end, owner);
            const Places of_parts = {__shfl_sync(FULL_WARP, places.full, owner),
                                     __shfl_sync(FULL_WARP, places.last, owner)};
            write_parts(parts, sequence - lane + owner, of_owner, __shfl_sync(FULL_WARP, cut.size, owner),
                        __shfl_sync(FULL_WARP, count, owner), __shfl_sync(FULL_WARP, first_slot, owner), of_parts,
                        lane, WARP_SIZE);
        }
    }
    for (int slot = num_parts + threadIdx.x; slot < num_slots; slot += THREADS)
        parts[slot] = {num_sequences, 0, 0, 0, 0, 0, 0, 0};
}
