// The plan of decode attention: plan_decode.cu writes KvSplits, a CTA per kv head (and slice) of paged_decode.cu reads
// one. A build of either defines WARPS and MEMBERS.
//
// Most splits belong to one sequence. Up to MEMBERS sequences with a common prefix form a group: the splits of the
// prefix are read once for all query rows of the group, the rest of each sequence by itself.
#pragma once

#include "common/types.cuh"

constexpr int TILE = 16;                       // tokens of a warp's step
constexpr int SPLIT_STEP = WARPS * WARP_SIZE;  // splits are multiples of it, so that all warps get equal shares

struct alignas(32) KvSplit {
    int sequence;     // whose block table is read; num_sequences in an unused slot
    int first;        // first token inside the window
    int begin, end;   // tokens of this split; begin is a multiple of TILE
    int count;        // partial results of the sequence
    int first_row;    // workspace row of the first of them
    int row;          // workspace row of this split's result, if count > 1
    int num_members;  // 0: a split of one sequence. Else of a group: count is unused, first_row is its first member's
                      // index, and row is added to each member's first_row
};

// A sequence of a group. These follow the slots, MEMBERS for each group.
struct alignas(16) PrefixGroupMember {
    int sequence, count, first_row, unused;
};
