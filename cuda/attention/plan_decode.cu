// plan_decode: divides a decode batch into KvSplits of about equal work (split-KV), once per step, on the device: one
// captured graph serves all lengths.
//
//   context_lens int32 [S], block_tables int32 [S, max_blocks] -> splits KvSplit [num_slots], members
//   PrefixGroupMember [max_groups, MEMBERS]
//   Splits of common prefixes, then of single sequences, longest first; an empty one for a sequence without visible
//   tokens; unused slots name sequence S.
//   Build macros: WARPS, MEMBERS, BLOCK_SIZE, MAX_SPLITS; MIN_SPLIT and MIN_COMMON in tokens.
//   grid (1), block (1024)
//   reference: NumpyOps.plan_decode_attention
//   needs: num_slots >= S, with target_splits > 0 (0: no splits) S + 2 * target_splits + max_groups, or target_splits
//   if S is 1; max_groups 0 if S > 1024, target_splits is 0 or the window hides tokens; block tables that share a block
//   are equal up to it
//   roofline: none, one launch
#include "attention/split_sizes.cuh"

constexpr int THREADS = 1024;
constexpr int CLASSES = WARP_SIZE;
constexpr int MIN_COMMON_BLOCKS = BLOCK_SIZE < MIN_COMMON ? MIN_COMMON / BLOCK_SIZE : 1;

// First slot of a sequence's full splits, and slot of its last split.
struct Slots {
    int full, last;
};

// A counting sort of splits by size, largest first.
struct SizeOrder {
    int* next;  // shared [CLASSES]: next free slot per class
    int largest;

    __device__ __forceinline__ int* of(int tokens) const {
        const i64 from_below = static_cast<i64>(tokens) * CLASSES / (largest + 1);
        return next + CLASSES - 1 - min(static_cast<i64>(CLASSES - 1), from_below);
    }
    __device__ __forceinline__ void count(const SequenceSplits& sequence_splits, int span) const {
        if (sequence_splits.count > 1) atomicAdd(of(sequence_splits.size), sequence_splits.count - 1);
        atomicAdd(of(sequence_splits.last_size(span)), 1);
    }
    // Called by one warp: turns counts into first slots.
    __device__ __forceinline__ void begin(int lane, int first) const {
        const int mine = next[lane];
        int before = first;
        for (int other = 0; other < CLASSES; other++) {
            const int count = __shfl_sync(FULL_WARP, mine, other);
            before += other < lane ? count : 0;
        }
        next[lane] = before;
    }
    __device__ __forceinline__ Slots take(const SequenceSplits& sequence_splits, int span) const {
        const int full = sequence_splits.count > 1 ? atomicAdd(of(sequence_splits.size), sequence_splits.count - 1) : 0;
        return {full, atomicAdd(of(sequence_splits.last_size(span)), 1)};
    }
};

// A sequence's common prefix. Comparing one block id finds groups, binary search the length.
struct CommonPrefix {
    int tokens = 0;  // a multiple of TILE; 0: no group
    int member_index = 0;
    int num_members = 0;  // set in the group's first member
    int num_groups = 0;
    int num_splits = 0;
    int split_tokens = 1;

    __device__ __forceinline__ bool is_first() const { return tokens > 0 && member_index % MEMBERS == 0; }
};

__device__ __forceinline__ CommonPrefix find_common_prefix(int context_len, const int* block_tables, int num_sequences,
                                              int max_blocks, int max_groups, int target_splits) {
    __shared__ int keys[THREADS], shortest[THREADS], sizes[THREADS], bases[THREADS];
    const int self = threadIdx.x;
    const int* table = block_tables + static_cast<i64>(self) * max_blocks;
    const int num_whole = (context_len - 1) / BLOCK_SIZE;  // blocks before the last token's
    const int block = self < num_sequences && num_whole >= MIN_COMMON_BLOCKS ? table[MIN_COMMON_BLOCKS - 1] : -1;
    const int key = block >= 0 ? block : -1 - self;
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
        int low = MIN_COMMON_BLOCKS,
            high = min(num_whole, shortest[leader]) + 1;
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            (table[middle - 1] == leaders[middle - 1] ? low : high) = middle;
        }
        atomicMin(&shortest[leader], low);
    }
    __syncthreads();

    const int size = sizes[leader];
    int num_member_slots;
    const int padded = leader == self && size > 1 ? ceil_div(size, MEMBERS) * MEMBERS : 0;
    const int base = block_scan(padded, &num_member_slots) - padded;
    bases[self] = base;
    __syncthreads();
    CommonPrefix prefix;
    prefix.member_index = bases[leader] + rank;
    prefix.num_groups = min(num_member_slots / MEMBERS, max_groups);
    if (size > 1 && prefix.member_index / MEMBERS < max_groups) {
        prefix.tokens = shortest[leader] * BLOCK_SIZE / TILE * TILE;
        prefix.num_members = min(MEMBERS, size - rank / MEMBERS * MEMBERS);
    }
    const int total = block_sum(prefix.is_first() ? prefix.tokens : 0);
    if (prefix.tokens > 0) {
        const int fair = max(MIN_SPLIT, ceil_div(total, target_splits));
        const int num_splits = min(ceil_div(prefix.tokens, fair), MAX_SPLITS);
        prefix.split_tokens = ceil_div(ceil_div(prefix.tokens, num_splits), SPLIT_STEP) * SPLIT_STEP;
        prefix.num_splits = ceil_div(prefix.tokens, prefix.split_tokens);
    }
    return prefix;
}

__device__ __forceinline__ void write_prefix_splits(KvSplit* splits, const CommonPrefix& prefix, int sequence,
                                                    int first_slot) {
    for (int i = 0; i < prefix.num_splits; ++i) {
        const int begin = i * prefix.split_tokens, end = min(begin + prefix.split_tokens, prefix.tokens);
        splits[first_slot + i] = {sequence, 0, begin, end, 0, prefix.member_index, i, prefix.num_members};
    }
}

struct OwnSplits {
    int sequence, size, num_splits;
    int num_before, first_row;  // splits of the prefix; first workspace row of all
    Slots at;

    __device__ __forceinline__ void write(KvSplit* splits, const VisibleRange& visible, int from, int stride) const {
        for (int i = from; i < num_splits; i += stride) {
            const int begin = visible.origin + i * size, end = min(begin + size, visible.end);
            splits[i < num_splits - 1 ? at.full + i : at.last] = {
                sequence, visible.first, begin, end, num_before + num_splits, first_row, first_row + num_before + i, 0};
        }
    }

    __device__ __forceinline__ OwnSplits of_lane(int lane) const {
        return {__shfl_sync(FULL_WARP, sequence, lane),
                __shfl_sync(FULL_WARP, size, lane),
                __shfl_sync(FULL_WARP, num_splits, lane),
                __shfl_sync(FULL_WARP, num_before, lane),
                __shfl_sync(FULL_WARP, first_row, lane),
                {__shfl_sync(FULL_WARP, at.full, lane), __shfl_sync(FULL_WARP, at.last, lane)}};
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    plan_decode(KvSplit* splits, const int* context_lens, const int* block_tables, int num_sequences,
                          int num_slots, int target_splits, int max_groups, int max_blocks, int window) {
    const int lane = threadIdx.x % WARP_SIZE, max_tokens = max_blocks * BLOCK_SIZE;
    PrefixGroupMember* members = reinterpret_cast<PrefixGroupMember*>(splits + num_slots);
    CommonPrefix prefix;
    if (max_groups > 0) {
        const int visible = threadIdx.x < num_sequences ? min(context_lens[threadIdx.x], max_tokens) : 0;
        prefix = find_common_prefix(visible, block_tables, num_sequences, max_blocks, max_groups, target_splits);
        if (prefix.num_groups > 0) target_splits = max(1, target_splits / 2);  // leaves the rest to prefixes
    }
    int total = 0, longest = 0;
    for (int s = threadIdx.x; s < num_sequences; s += THREADS) {
        const int span = VisibleRange(context_lens[s], max_tokens, window, prefix.tokens).span();
        total += span;
        longest = max(longest, span);
    }
    total = block_sum(total);
    longest = block_max(longest, 0);
    const SplitSize split_size(total, longest, num_sequences, target_splits);

    int num_splits;
    const int num_prefix_splits = prefix.is_first() ? prefix.num_splits : 0;
    const int first_prefix_split = block_scan(num_prefix_splits, &num_splits) - num_prefix_splits;
    if (num_prefix_splits > 0) write_prefix_splits(splits, prefix, threadIdx.x, first_prefix_split);

    __shared__ int next[CLASSES];
    const SizeOrder size_order = {next, min(longest, split_size.threshold)};
    if (!split_size.is_even) {
        if (threadIdx.x < CLASSES) next[threadIdx.x] = 0;
        __syncthreads();
        for (int s = threadIdx.x; s < num_sequences; s += THREADS) {
            const int span = VisibleRange(context_lens[s], max_tokens, window, prefix.tokens).span();
            size_order.count(SequenceSplits(split_size, span), span);
        }
        __syncthreads();
        if (threadIdx.x < WARP_SIZE) size_order.begin(lane, num_splits);
        __syncthreads();
    }

    int num_rows = 0;
    for (int base = 0; base < num_sequences; base += THREADS) {
        const int sequence = base + threadIdx.x;
        const VisibleRange visible(sequence < num_sequences ? context_lens[sequence] : 0, max_tokens, window,
                                   prefix.tokens);
        const SequenceSplits sequence_splits(split_size, visible.span());
        const int count = sequence < num_sequences ? sequence_splits.count : 0;
        const int results = count > 0 ? prefix.num_splits + count : 0;
        int added, added_rows;
        const int first_slot = num_splits + block_scan(count, &added) - count;
        const int first_row = num_rows + block_scan(results, &added_rows) - results;
        num_splits += added;
        num_rows += added_rows;
        if (prefix.tokens > 0 && count > 0) members[prefix.member_index] = {sequence, results, first_row, 0};
        Slots slots = {first_slot, first_slot + count - 1};
        if (count > 0 && !split_size.is_even) slots = size_order.take(sequence_splits, visible.span());
        const OwnSplits own_splits{sequence, sequence_splits.size, count, prefix.num_splits, first_row, slots};
        if (count == 1) own_splits.write(splits, visible, 0, 1);
        for (u32 split_lanes = __ballot_sync(FULL_WARP, count > 1); split_lanes != 0; split_lanes &= split_lanes - 1) {
            const int owner = __ffs(split_lanes) - 1;
            VisibleRange owner_range = visible;
            owner_range.first = __shfl_sync(FULL_WARP, visible.first, owner);
            owner_range.origin = __shfl_sync(FULL_WARP, visible.origin, owner);
            owner_range.end = __shfl_sync(FULL_WARP, visible.end, owner);
            own_splits.of_lane(owner).write(splits, owner_range, lane, WARP_SIZE);
        }
    }
    for (int slot = num_splits + threadIdx.x; slot < num_slots; slot += THREADS)
        splits[slot] = {num_sequences, 0, 0, 0, 0, 0, 0, 0};
}
