// plan_exact_rows: plan_decode for few rows, each split as in a batch of one. Adjacent rows of a sequence (a token and
// its drafts) form groups of up to MEMBERS that read splits once: the smallest groups whose splits run at once.
//
//   arrays as in plan_decode, but members PrefixGroupMember [S]
//   A split names the last row of its sequence and ends with its tokens, so splits of two groups differ only in their
//   rows: the first member with tokens there and the number of members from it. Tokens from `count` on may be of this
//   step. num_stripes slots past the last name sequence S.
//   Build macros: WARPS, MEMBERS, BLOCK_SIZE, MAX_SPLITS, MIN_SPLIT in tokens.
//   grid (1), block (32)
//   reference: NumpyOps.plan_decode_attention
//   needs: S <= 32, num_slots >= the splits of S batches of one; block tables as in plan_decode
//   roofline: none, one launch
#include "attention/split_sizes.cuh"

// Adjacent rows that may form groups.
struct Run {
    int first, end;

    __device__ __forceinline__ Run(const VisibleRange& visible, const SequenceSplits& splits, bool is_row,
                                   const int* block_tables, int max_blocks) {
        const int row = threadIdx.x;
        const bool may_share = is_row && splits.count > 1 && visible.first == 0;
        const int end_before = __shfl_up_sync(FULL_WARP, visible.end, 1);
        const int size_before = __shfl_up_sync(FULL_WARP, splits.size, 1);
        const bool may_share_before = __shfl_up_sync(FULL_WARP, static_cast<int>(may_share), 1) != 0;
        bool joins = row > 0 && may_share && may_share_before;
        joins = joins && size_before == splits.size && end_before <= visible.end;
        if (joins) {
            const int* entry = block_tables + static_cast<i64>(row) * max_blocks + (end_before - 1) / BLOCK_SIZE;
            joins = entry[0] == entry[-max_blocks];
        }
        const u32 starts = __ballot_sync(FULL_WARP, !joins), up_to_row = FULL_WARP >> (31 - row);
        first = 31 - __clz(starts & up_to_row);
        end = (starts & ~up_to_row) != 0 ? __ffs(starts & ~up_to_row) - 1 : WARP_SIZE;
    }
};

extern "C" __global__ void __launch_bounds__(WARP_SIZE)
    plan_exact_rows(KvSplit* splits, const int* context_lens, const int* block_tables, int num_sequences, int num_slots,
                    int target_splits, int num_stripes, int max_blocks, int window) {
    PrefixGroupMember* members = reinterpret_cast<PrefixGroupMember*>(splits + num_slots);
    const int row = threadIdx.x;
    const bool is_row = row < num_sequences;
    const VisibleRange visible(is_row ? context_lens[row] : 0, max_blocks * BLOCK_SIZE, window, 0);
    const SequenceSplits own(SplitSize(visible.span(), visible.span(), 1, target_splits), visible.span());
    const int count = is_row ? own.count : 0;
    const Run run(visible, own, is_row, block_tables, max_blocks);

    bool leads;
    int num_members, num_splits, total;
    for (int most = 1;; most = min(2 * most, MEMBERS)) {
        const int length = run.end - run.first;
        const int of_group = ceil_div(length, ceil_div(length, most));
        leads = is_row && (row - run.first) % of_group == 0;
        num_members = min(of_group, run.end - row);
        const int of_last = __shfl_sync(FULL_WARP, count, (row + num_members - 1) % WARP_SIZE);
        num_splits = leads ? of_last : 0;
        total = warp_sum(num_splits);
        if (most == MEMBERS || total <= num_stripes) break;
    }

    int all;
    const int first_slot = block_scan(num_splits, &all) - num_splits;
    const int first_row = block_scan(count, &all) - count;
    if (is_row) members[row] = {row, count, first_row, visible.end};
    for (u32 leaders = __ballot_sync(FULL_WARP, leads); leaders != 0; leaders &= leaders - 1) {
        const int leader = __ffs(leaders) - 1;
        const int size = __shfl_sync(FULL_WARP, own.size, leader);
        const int first = __shfl_sync(FULL_WARP, visible.first, leader);
        const int origin = __shfl_sync(FULL_WARP, visible.origin, leader);
        const int slot = __shfl_sync(FULL_WARP, first_slot, leader);
        const int most = __shfl_sync(FULL_WARP, num_splits, leader);
        const int of_group = __shfl_sync(FULL_WARP, num_members, leader), last = leader + of_group - 1;
        const int of_run = __shfl_sync(FULL_WARP, run.end, leader) - 1;
        const int run_end = __shfl_sync(FULL_WARP, visible.end, of_run);
        const int first_new = __shfl_sync(FULL_WARP, visible.end, leader) - num_sequences;
        int counts[MEMBERS];
#pragma unroll
        for (int m = 0; m < MEMBERS; ++m) counts[m] = __shfl_sync(FULL_WARP, count, min(leader + m, last));
        for (int i = row; i < most; i += WARP_SIZE) {
            int ended = 0;  // members without tokens in this split
#pragma unroll
            for (int m = 0; m < MEMBERS; ++m) ended += m < of_group && counts[m] <= i;
            const int begin = origin + i * size, end = min(begin + size, run_end);
            splits[slot + i] = {of_run, first, begin, end, first_new, leader + ended, i, of_group - ended};
        }
    }
    const int last_slot = min(num_slots, total + num_stripes);
    for (int slot = total + row; slot < last_slot; slot += WARP_SIZE)
        splits[slot] = {num_sequences, 0, 0, 0, 0, 0, 0, 0};
    __threadfence();  // paged_decode_exact reads the plan before its previous kernel has ended
}
