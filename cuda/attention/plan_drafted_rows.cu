// plan_drafted_rows: plan_decode for speculative decoding: adjacent rows may be a token and its drafts. Up to MEMBERS
// rows of a sequence form a group that reads its tokens once, each row up to its own end.
//
//   arrays as in plan_decode, but members PrefixGroupMember [S]
//   Splits of groups in row order, in the format of plan_exact_rows; unused slots name sequence S.
//   Build macros: THREADS, WARPS, MEMBERS, BLOCK_SIZE, MAX_SPLITS, MIN_SPLIT in tokens.
//   grid (1), block (THREADS)
//   reference: NumpyOps.plan_decode_attention
//   needs: S <= THREADS, num_slots >= S + 2 * target_splits; block tables as in plan_decode
//   roofline: none, one launch
#include "attention/split_sizes.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    plan_drafted_rows(KvSplit* splits, const int* context_lens, const int* block_tables, int num_sequences,
                      int num_slots, int target_splits, int max_blocks, int window) {
    __shared__ int ends[THREADS], sizes[THREADS], counts[THREADS];
    __shared__ bool begins[THREADS + 1];  // the row does not continue the previous row's sequence
    PrefixGroupMember* members = reinterpret_cast<PrefixGroupMember*>(splits + num_slots);
    const int row = threadIdx.x, max_tokens = max_blocks * BLOCK_SIZE;
    const bool is_row = row < num_sequences;
    const VisibleRange visible(is_row ? context_lens[row] : 0, max_tokens, window, 0);
    ends[row] = visible.end;
    __syncthreads();
    bool joins = is_row && row > 0 && visible.first == 0 && ends[row - 1] > 0 && ends[row - 1] <= visible.end;
    if (joins) {
        const int* entry = block_tables + static_cast<i64>(row) * max_blocks + (ends[row - 1] - 1) / BLOCK_SIZE;
        joins = entry[0] == entry[-max_blocks];
    }
    begins[row] = !joins;
    if (row == 0) begins[THREADS] = true;
    __syncthreads();

    int first = row;
    while (!begins[first]) --first;
    const int leader = row - (row - first) % MEMBERS;
    const bool leads = is_row && leader == row;
    int num_members = 1;
    while (num_members < MEMBERS && !begins[row + num_members]) ++num_members;
    const int last_end = ends[row + num_members - 1];
    const int span = leads ? last_end - visible.origin : 0;
    const int total = block_sum(span), longest = block_max(span, 0), num_groups = block_sum(static_cast<int>(leads));
    const SequenceSplits own(SplitSize(total, longest, num_groups, target_splits), span);
    const int num_splits = leads ? own.count : 0;
    sizes[row] = own.size;
    __syncthreads();
    const int count = is_row ? max(1, ceil_div(visible.span(), sizes[leader])) : 0;
    counts[row] = count;

    int num_used, num_results;
    const int first_slot = block_scan(num_splits, &num_used) - num_splits;
    const int first_row = block_scan(count, &num_results) - count;
    if (is_row) members[row] = {row, count, first_row, visible.end};
    // First token that may be of this step; a bound where the window hides tokens, since rows do not join there.
    const int first_new = visible.first > 0 ? visible.end - num_sequences : ends[first] - 1;
    int ended = 0;  // members without tokens in this split
    for (int i = 0; i < num_splits; ++i) {
        while (counts[row + ended] <= i) ++ended;
        const int begin = visible.origin + i * own.size, end = min(begin + own.size, last_end);
        splits[first_slot + i] = {row + num_members - 1, visible.first, begin, end, first_new, row + ended, i,
                                  num_members - ended};
    }
    for (int slot = num_used + row; slot < num_slots; slot += THREADS)
        splits[slot] = {num_sequences, 0, 0, 0, 0, 0, 0, 0};
    __threadfence();  // paged_decode_exact reads the plan before its previous kernel has ended
}
