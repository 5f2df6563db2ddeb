// plan_exact_rows: plan_decode for few rows, each split as in a batch of one, so that it gets the bits of a batch of one.
// Adjacent rows of one sequence, a token and its drafts, form groups of up to MEMBERS, which read their equal splits once.
//
//   Arguments, macros and results: plan_decode.cu. Order: splits of groups, then of rows.
//   grid (1), block (32)
//   reference: NumpyOps.plan_decode_attention
//   needs: S <= 32, num_slots >= S, max_groups >= S / 2, or 0: nothing is shared. Tables with one block in common
//   agree up to it.
//   If the splits exceed num_slots, target_splits is halved until they fit: then rows differ from a batch of one.
//   roofline: none, about one launch
#include "attention/split_sizes.cuh"

struct Row {
    int index;  // the lane
    VisibleRange visible;
    SequenceSplits splits;

    __device__ __forceinline__ Row(const VisibleRange& visible, int target_splits)
        : index(threadIdx.x), visible(visible), splits(SplitSize(visible.span(), visible.span(), 1, target_splits),
                                                       visible.span()) {}

    // Splits that a group may share: before the last, in a window that hides nothing.
    __device__ __forceinline__ int num_full() const { return visible.first == 0 ? splits.count - 1 : 0; }
};

struct RowGroup {
    int leader;  // row
    int num_members;
    int num_shared = 0;  // splits; 0: no group

    __device__ __forceinline__ RowGroup(const Row& row, const int* block_tables, int max_blocks, int max_groups) {
        const int full = row.num_full(), size = row.splits.size;
        const int shared = min(full, __shfl_up_sync(FULL_WARP, full, 1));
        const bool is_alike = __shfl_up_sync(FULL_WARP, size, 1) == size;
        bool joins = row.index > 0 && shared > 0 && is_alike;
        if (joins) {
            const int* entry = block_tables + static_cast<i64>(row.index) * max_blocks + (shared * size - 1) / BLOCK_SIZE;
            joins = entry[0] == entry[-max_blocks];
        }
        const u32 starts = __ballot_sync(FULL_WARP, !joins);
        const int start = 31 - __clz(starts & (FULL_WARP >> (31 - row.index)));
        const u32 later = starts & ~(FULL_WARP >> (31 - row.index));
        const int end = later != 0 ? __ffs(later) - 1 : WARP_SIZE;
        leader = start + (row.index - start) / MEMBERS * MEMBERS;
        num_members = min(MEMBERS, end - leader);
        int least = full;
#pragma unroll
        for (int m = 0; m < MEMBERS; ++m) {
            const int other = __shfl_sync(FULL_WARP, full, (leader + m) % WARP_SIZE);
            least = m < num_members ? min(least, other) : least;
        }
        if (num_members > 1 && max_groups > 0) num_shared = least;
    }
};

extern "C" __global__ void __launch_bounds__(WARP_SIZE)
    plan_exact_rows(KvSplit* splits, const int* context_lens, const int* block_tables, int num_sequences, int num_slots,
                    int target_splits, int max_groups, int max_blocks, int window) {
    PrefixGroupMember* members = reinterpret_cast<PrefixGroupMember*>(splits + num_slots);
    const int lane = threadIdx.x;
    const bool is_row = lane < num_sequences;
    const VisibleRange visible(is_row ? context_lens[lane] : 0, max_blocks * BLOCK_SIZE, window, 0);
    Row row(visible, target_splits);
    RowGroup group(row, block_tables, max_blocks, max_groups);
    int num_own, num_led, num_group_splits, num_splits;
    while (true) {
        num_own = is_row ? row.splits.count - group.num_shared : 0;
        num_led = lane == group.leader ? group.num_shared : 0;
        num_group_splits = warp_sum(num_led);
        num_splits = num_group_splits + warp_sum(num_own);
        if (num_splits <= num_slots || target_splits <= 1) break;
        target_splits = (target_splits + 1) / 2;
        row = Row(visible, target_splits);
        group = RowGroup(row, block_tables, max_blocks, max_groups);
    }

    const u32 leaders = __ballot_sync(FULL_WARP, num_led > 0);
    const int group_index = __popc(leaders & ((1u << group.leader) - 1));
    const int member_index = group_index * MEMBERS + lane - group.leader;
    const int count = is_row ? row.splits.count : 0, size = row.splits.size;
    int total;
    const int first_led = block_scan(num_led, &total) - num_led;
    const int first_own = num_group_splits + block_scan(num_own, &total) - num_own;
    const int first_row = block_scan(count, &total) - count;
    for (int i = 0; i < num_led; ++i)
        splits[first_led + i] = {lane, 0, i * size, (i + 1) * size, 0, member_index, i, group.num_members};
    if (group.num_shared > 0) members[member_index] = {lane, count, first_row, 0};
    for (int i = group.num_shared; i < count; ++i) {
        const int begin = visible.origin + i * size, end = min(begin + size, visible.end);
        splits[first_own + i - group.num_shared] = {lane, visible.first, begin, end, count, first_row, first_row + i, 0};
    }
    for (int slot = num_splits + lane; slot < num_slots; slot += WARP_SIZE)
        splits[slot] = {num_sequences, 0, 0, 0, 0, 0, 0, 0};
}
