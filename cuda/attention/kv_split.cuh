// The plan of decode attention, from plan_decode.cu to paged_decode.cu. A build defines WARPS and MEMBERS.
//
// Up to MEMBERS sequences with a common prefix form a group, whose prefix is read once for all.
#pragma once

#include "common/types.cuh"

constexpr int TILE = 16;  // tokens of a warp's step
constexpr int SPLIT_STEP = WARPS * WARP_SIZE;  // divides splits: equal shares for warps

struct alignas(32) KvSplit {
    int sequence;  // num_sequences in an unused slot
    int first;  // first token in the window
    int begin, end;  // tokens; begin is a multiple of TILE
    int count;  // partial results of the sequence
    int first_row;  // its first workspace row; of a group: index of its first member
    int row;  // of this result, if count > 1; of a group: added to each member's first_row
    int num_members;  // 0: one sequence
};

// A sequence of a group; MEMBERS for each group follow the slots.
struct alignas(16) PrefixGroupMember {
    int sequence, count, first_row;
    int end;  // of its tokens, in plan_exact_rows.cu
};
