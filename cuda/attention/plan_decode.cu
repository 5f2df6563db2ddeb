// plan_decode: cuts the sequences of a batch into parts of about equal work, once for all layers of a step. On
// the device, so that a captured graph serves every mix of lengths.
//
//   context_lens int32[S], block_tables int32[S, max_blocks] -> parts Part[num_slots], members Member[max_groups, MEMBERS]
//   behind them. First the parts that groups of sequences have in common, then those of sequences by themselves, in the
//   order in which blocks take them: the longest first, so that what is left at the end is short (one after the other
//   without regard to that, the blocks of 128 chats are busy for 62 % of the time until the last has ended, and so for
//   89 %). A sequence much longer than a block's fair share is cut; one that sees nothing still has a part. Behind the
//   last part stand some of sequence S, for nothing.
//   A build defines WARPS, MEMBERS, BLOCK_SIZE (of paged_decode), MIN_PART, MIN_COMMON and MAX_SPLITS.
//   grid (1), block (1024)
//   reference: NumpyOps.plan_decode_attention
//   needs: num_slots at least S, and S + 2 * num_shares + max_groups where num_shares is not 0; 0 leaves all sequences
//   whole. max_groups is 0 (no groups) where S is above 1024, num_shares is 0 or the window hides tokens. Tables that
//   name one block at one place name the same blocks before it.
//   roofline: none; a few kilobytes, it should cost a launch and a few loads. Each block of paged_decode would
//   otherwise do the same: 66 us a layer at 512 short sequences on an H200.
#include "attention/kv_split.cuh"

constexpr int THREADS = 1024;
constexpr int CLASSES = WARP_SIZE;  // of parts, by size
constexpr int LOOKED_AT = BLOCK_SIZE < MIN_COMMON ? MIN_COMMON / BLOCK_SIZE : 1;  // blocks that a group has in common

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

// What a sequence shows of its context.
struct Seen {
    int first, origin, end;  // first token seen, where its own parts begin (the tile it lies in), the context's end

    // Without the first `common` tokens, which are a multiple of TILE.
    __device__ __forceinline__ Seen(int context_len, int max_tokens, int window, int common) {
        end = max(0, min(context_len, max_tokens));
        first = max(0, end - window);
        origin = max(common, first / TILE * TILE);
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
    // By one warp: from how many there are of each class to where it begins, the first one at `first`.
    __device__ __forceinline__ void begin(int lane, int first) const {
        const int mine = next[lane];
        int before = first;
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

// What a sequence has in common with others of the batch. Tables that name one block at one place name the same blocks
// before it, so a look at one place finds who belongs together, and a binary search how far.
struct Common {
    int tokens = 0;       // in common, a multiple of TILE that leaves every sequence one of its own at least; 0: nothing
    int place = 0;        // among the members of all groups, MEMBERS places each
    int num_members = 0;  // of the group, where this sequence is its first
    int num_groups = 0;   // of the batch
    int num_parts = 0;    // that the group reads what is in common in
    int part_tokens = 1;

    __device__ __forceinline__ bool is_first() const { return tokens > 0 && place % MEMBERS == 0; }
};

// Every thread of the block calls, each with a sequence of its own or none.
__device__ __forceinline__ Common find_common(int context_len, const int* block_tables, int num_sequences,
                                              int max_blocks, int max_groups, int num_shares) {
    __shared__ int keys[THREADS], shortest[THREADS], sizes[THREADS], bases[THREADS];
    const int self = threadIdx.x;
    const int* table = block_tables + static_cast<i64>(self) * max_blocks;
    const int num_whole = (context_len - 1) / BLOCK_SIZE;  // blocks before the one that holds the last token
    const int block = self < num_sequences && num_whole >= LOOKED_AT ? table[LOOKED_AT - 1] : -1;
    const int key = block >= 0 ? block : -1 - self;  // nobody else's
    keys[self] = key;
    shortest[self] = num_whole;
    sizes[self] = 0;
    __syncthreads();
    int leader = self, rank = 0;
    const int num_before = block >= 0 ? self : 0;
#pragma unroll 8
    for (int other = 0; other < num_before; ++other) {
        const bool is_alike = keys[other] == key;
        leader = is_alike ? min(leader, other) : leader;
        rank += is_alike;
    }
    atomicAdd(&sizes[leader], 1);
    if (rank > 0) {
        const int* leaders = block_tables + static_cast<i64>(leader) * max_blocks;
        int low = LOOKED_AT, high = min(num_whole, shortest[leader]) + 1;  // `low` blocks are in common, `high` are not
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            (table[middle - 1] == leaders[middle - 1] ? low : high) = middle;
        }
        atomicMin(&shortest[leader], low);
    }
    __syncthreads();

    const int size = sizes[leader];
    int num_places;
    const int padded = leader == self && size > 1 ? ceil_div(size, MEMBERS) * MEMBERS : 0;
    const int base = block_scan(padded, &num_places) - padded;
    bases[self] = base;
    __syncthreads();
    Common common;
    common.place = bases[leader] + rank;
    common.num_groups = min(num_places / MEMBERS, max_groups);
    if (size > 1 && common.place / MEMBERS < max_groups) {
        common.tokens = shortest[leader] * BLOCK_SIZE / TILE * TILE;
        common.num_members = min(MEMBERS, size - rank / MEMBERS * MEMBERS);
    }
    const int total = block_sum(common.is_first() ? common.tokens : 0);
    if (common.tokens > 0) {
        const int fair = max(MIN_PART, ceil_div(total, num_shares));
        const int num_parts = min(ceil_div(common.tokens, fair), MAX_SPLITS);
        common.part_tokens = ceil_div(ceil_div(common.tokens, num_parts), PART_STEP) * PART_STEP;
        common.num_parts = ceil_div(common.tokens, common.part_tokens);
    }
    return common;
}

// The parts of what a group has in common, by the thread of its first sequence.
__device__ __forceinline__ void write_common(Part* parts, const Common& common, int sequence, int first_slot) {
    for (int i = 0; i < common.num_parts; ++i) {
        const int begin = i * common.part_tokens, end = min(begin + common.part_tokens, common.tokens);
        parts[first_slot + i] = {sequence, 0, begin, end, 0, common.place, i, common.num_members};
    }
}

// The parts of a sequence by itself.
struct Own {
    int sequence, size, num_parts;
    int num_before, first_row;  // results of parts in common, whose rows come first; the first of all
    Places at;

    // Those from `from` on, every `stride`-th.
    __device__ __forceinline__ void write(Part* parts, const Seen& seen, int from, int stride) const {
        for (int i = from; i < num_parts; i += stride) {
            const int begin = seen.origin + i * size, end = min(begin + size, seen.end);
            parts[i < num_parts - 1 ? at.full + i : at.last] = {
                sequence, seen.first, begin, end, num_before + num_parts, first_row, first_row + num_before + i, 0};
        }
    }

    __device__ __forceinline__ Own of_lane(int lane) const {
        return {__shfl_sync(FULL_WARP, sequence, lane),
                __shfl_sync(FULL_WARP, size, lane),
                __shfl_sync(FULL_WARP, num_parts, lane),
                __shfl_sync(FULL_WARP, num_before, lane),
                __shfl_sync(FULL_WARP, first_row, lane),
                {__shfl_sync(FULL_WARP, at.full, lane), __shfl_sync(FULL_WARP, at.last, lane)}};
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    plan_decode(Part* parts, const int* context_lens, const int* block_tables, int num_sequences,
                          int num_slots, int num_shares, int max_groups, int max_blocks, int window) {
    const int lane = threadIdx.x % WARP_SIZE, max_tokens = max_blocks * BLOCK_SIZE;
    Member* members = reinterpret_cast<Member*>(parts + num_slots);
    Common common;
    if (max_groups > 0) {  // then a thread has one sequence at most
        const int seen = threadIdx.x < num_sequences ? min(context_lens[threadIdx.x], max_tokens) : 0;
        common = find_common(seen, block_tables, num_sequences, max_blocks, max_groups, num_shares);
        if (common.num_groups > 0) num_shares = max(1, num_shares / 2);  // the others are for what is in common
    }
    int total = 0, longest = 0;
    for (int s = threadIdx.x; s < num_sequences; s += THREADS) {
        const int span = Seen(context_lens[s], max_tokens, window, common.tokens).span();
        total += span;
        longest = max(longest, span);
    }
    total = block_sum(total);
    longest = block_max(longest, 0);
    const Share share(total, longest, num_sequences, num_shares);

    int num_parts;
    const int num_common = common.is_first() ? common.num_parts : 0;
    const int first_common = block_scan(num_common, &num_parts) - num_common;
    if (num_common > 0) write_common(parts, common, threadIdx.x, first_common);

    __shared__ int next[CLASSES];
    const Order order = {next, min(longest, share.threshold)};
    if (!share.is_even) {
        if (threadIdx.x < CLASSES) next[threadIdx.x] = 0;
        __syncthreads();
        for (int s = threadIdx.x; s < num_sequences; s += THREADS) {
            const int span = Seen(context_lens[s], max_tokens, window, common.tokens).span();
            order.count(Cut(share, span), span);
        }
        __syncthreads();
        if (threadIdx.x < WARP_SIZE) order.begin(lane, num_parts);
        __syncthreads();
    }

    int num_rows = 0;
    for (int base = 0; base < num_sequences; base += THREADS) {
        const int sequence = base + threadIdx.x;
        const Seen seen(sequence < num_sequences ? context_lens[sequence] : 0, max_tokens, window, common.tokens);
        const Cut cut(share, seen.span());
        const int count = sequence < num_sequences ? cut.count : 0;
        const int results = count > 0 ? common.num_parts + count : 0;
        int added, added_rows;
        const int first_slot = num_parts + block_scan(count, &added) - count;
        const int first_row = num_rows + block_scan(results, &added_rows) - results;
        num_parts += added;
        num_rows += added_rows;
        if (common.tokens > 0 && count > 0) members[common.place] = {sequence, results, first_row, 0};
        Places places = {first_slot, first_slot + count - 1};
        if (count > 0 && !share.is_even) places = order.take(cut, seen.span());
        const Own own{sequence, cut.size, count, common.num_parts, first_row, places};
        if (count == 1) own.write(parts, seen, 0, 1);
        for (u32 several = __ballot_sync(FULL_WARP, count > 1); several != 0; several &= several - 1) {
            const int owner = __ffs(several) - 1;
            Seen of_owner = seen;
            of_owner.first = __shfl_sync(FULL_WARP, seen.first, owner);
            of_owner.origin = __shfl_sync(FULL_WARP, seen.origin, owner);
            of_owner.end = __shfl_sync(FULL_WARP, seen.end, owner);
            own.of_lane(owner).write(parts, of_owner, lane, WARP_SIZE);
        }
    }
    for (int slot = num_parts + threadIdx.x; slot < num_slots; slot += THREADS)
        parts[slot] = {num_sequences, 0, 0, 0, 0, 0, 0, 0};
}
