// Split-KV plan of decode attention. Up to MEMBERS sequences with a common prefix form a group that reads it once.
#pragma once

#include "common/types.cuh"

constexpr int TILE = 16;  // tokens per warp step
constexpr int SPLIT_STEP = WARPS * WARP_SIZE;  // split sizes are multiples: equal work per warp

struct alignas(32) KvSplit {
    int sequence;  // num_sequences: unused slot
    int first;  // first token in the sliding window
    int begin, end;  // token range; begin is a multiple of TILE
    int count;  // partial results of the sequence; in exact and drafted plans its first new token
    int first_row;  // first workspace row; of a group: first member
    int row;  // workspace row if count > 1; of a group: added to members' first_row
    int num_members;  // 0: one sequence
};

// MEMBERS entries per group follow the slots.
struct alignas(16) PrefixGroupMember {
    int sequence, count, first_row;
    int end;  // of its tokens; set by plan_exact_rows, plan_drafted_rows
};
