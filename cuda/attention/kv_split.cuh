// The plan of decode attention. Up to MEMBERS sequences with a common prefix form a group, which reads it once.
#pragma once

#include "common/types.cuh"

constexpr int TILE = 16;  // tokens of a warp's step
constexpr int SPLIT_STEP = WARPS * WARP_SIZE;  // divides splits: equal shares for warps

struct alignas(32) KvSplit {
    int sequence;  // num_sequences: unused
    int first;  // first token in the window
    int begin, end;  // tokens; begin is a multiple of TILE
    int count;  // partial results of the sequence
    int first_row;  // first workspace row; of a group: first member
    int row;  // workspace row if count > 1; of a group: added to members' first_row
    int num_members;  // 0: one sequence
};

// MEMBERS of each group follow the slots.
struct alignas(16) PrefixGroupMember {
    int sequence, count, first_row;
    int end;  // of its tokens, in plan_exact_rows.cu
};
