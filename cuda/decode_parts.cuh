// A part of a sequence in decode attention: what one block per kv head (and slice) reads. plan_decode_attention.cu cuts a
// batch into parts, paged_decode_attention.cu reads them; a build of either defines WARPS.
#pragma once

#include "types.cuh"

constexpr int TILE = 16;                      // tokens of a warp's step
constexpr int PART_STEP = WARPS * WARP_SIZE;  // parts are multiples of it, so that every warp gets its share

struct alignas(32) Part {
    int sequence;    // behind the last one in a slot that stands for nothing
    int first;       // token that the window shows first
    int begin, end;  // tokens of this part; begin is a multiple of TILE, and end at most the context's end
    int count;       // parts of the sequence
    int first_slot;  // of the sequence's parts
    int slot;        // its own: first_slot and up, in the order of the tokens
    int unused;
};
