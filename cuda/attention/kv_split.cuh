// A part of decode attention: what one block per kv head (and slice) reads. plan_decode.cu cuts a batch into
// parts, paged_decode.cu reads them; a build of either defines WARPS and MEMBERS.
//
// Most parts are of one sequence. Sequences that begin with the same blocks stand in groups of up to MEMBERS: what they
// have in common is read once for all queries of a group, in parts of its own, and the rest of each by itself.
#pragma once

#include "common/types.cuh"

constexpr int TILE = 16;                      // tokens of a warp's step
constexpr int PART_STEP = WARPS * WARP_SIZE;  // parts are multiples of it, so that every warp gets its share

struct alignas(32) Part {
    int sequence;     // whose table is read; behind the last one in a slot that stands for nothing
    int first;        // token that the window shows first
    int begin, end;   // tokens of this part; begin is a multiple of TILE, and end at most the context's end
    int count;        // results that the sequence is put together from
    int first_row;    // of the workspace, where the first of these lies
    int row;          // of the workspace, where this part's result lies, if count is above 1
    int num_members;  // 0: a part of one sequence. Else of a group: count is nothing, first_row is its first Member, and
                      // row is added to each member's first_row
};

// A sequence of a group. They lie behind the slots, MEMBERS for each group.
struct alignas(16) Member {
    int sequence, count, first_row, unused;
};
