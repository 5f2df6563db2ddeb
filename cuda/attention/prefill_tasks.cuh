// Which keys of which piece of work a CTA has where clusters of CTAs share out few pieces among them: helps
// paged_prefill_short_sm90.cu. Pieces are those of prefill_work.cuh.
//
// With no more pieces than clusters, each CTA of a cluster has a part of one piece's keys; with some more, those of a
// cluster are shared out among its pieces; with more still, every CTA has pieces of its own, round after round.
#pragma once

#include "attention/attention.cuh"
#include "attention/prefill_tiles.cuh"
#include "attention/prefill_work.cuh"
#include "common/types.cuh"

constexpr int MIN_PART_KEYS = 128;

// a / b of numbers from 0 to a million, in a fifth of the time.
__device__ __forceinline__ int quotient(int a, int b) { return static_cast<int>(__fdividef(a + 0.5f, b)); }

// What a CTA does in a round: a part of the keys of a piece, in tiles from `begin` on.
struct Task {
    Work work;
    int sequence;      // num_sequences where there is nothing to do
    int index, count;  // of the parts
    int begin;         // where the first tile begins

    __device__ __forceinline__ int num_tiles() const { return max(0, ceil_div(work.end_key - begin, KEYS)); }

    // Narrows the keys to those of the part, in whole boxes; few keys make fewer parts.
    __device__ __forceinline__ void take_part(int nothing) {
        const int first = work.first_key / BLOCK_KEYS, num_boxes = max(0, ceil_div(work.end_key, BLOCK_KEYS) - first);
        count = min(count, max(1, num_boxes * BLOCK_KEYS / MIN_PART_KEYS));
        if (index >= count) sequence = nothing;
        begin = (first + quotient(index * num_boxes, count)) * BLOCK_KEYS;
        work.first_key = max(work.first_key, begin);
        work.end_key = min(work.end_key, (first + quotient((index + 1) * num_boxes, count)) * BLOCK_KEYS);
    }
};

// The chunks of 32 sequences, one a lane; `end` of them pieces of one kv head up to the lane's own, `total` in all.
struct Chunks {
    int start, num_tokens, context_len, end, total;

    __device__ __forceinline__ void load(const Batch& batch, int first) {
        const int lane = threadIdx.x % WARP_SIZE, sequence = first + lane;
        start = num_tokens = context_len = 0;
        if (sequence < batch.num_sequences) {
            start = batch.query_start[sequence];
            num_tokens = max(0, batch.query_start[sequence + 1] - start);
            context_len = batch.context_lens[sequence];
        }
        end = ceil_div(num_tokens * GROUP, ROWS);
#pragma unroll
        for (int offset = 1; offset < WARP_SIZE; offset *= 2) {
            const int left = __shfl_up_sync(FULL_WARP, end, offset);
            if (lane >= offset) end += left;
        }
        total = __shfl_sync(FULL_WARP, end, WARP_SIZE - 1);
    }
};

// Every lane of a warp calls, and gets the same. All that has to come from memory is asked for at once.
__device__ __forceinline__ Task find_task(const Batch& batch, int cluster_size, int round) {
    Task task;
    task.sequence = batch.num_sequences;
    Chunks chunks;
    int num_pieces = 0;
    for (int first = 0; first < batch.num_sequences; first += WARP_SIZE) {
        chunks.load(batch, first);
        num_pieces += chunks.total;
    }
    num_pieces *= batch.num_kv_heads;

    const int cluster = quotient(blockIdx.x, cluster_size), rank = blockIdx.x - cluster * cluster_size;
    const int num_clusters = quotient(gridDim.x, cluster_size);
    const int share = max(1, quotient(num_pieces + num_clusters - 1, num_clusters));  // of a cluster
    task.count = max(1, quotient(cluster_size, share));
    const int of_cluster = quotient(rank, task.count);
    task.index = rank - of_cluster * task.count;
    const int piece = task.count == 1 ? blockIdx.x + round * gridDim.x : cluster * share + of_cluster;
    const bool is_there = task.count == 1 || (round == 0 && of_cluster < share);
    if (!is_there || piece >= num_pieces) return task;

    const int wanted = quotient(piece, batch.num_kv_heads);
    int first = 0, before = 0;
    for (;; first += WARP_SIZE) {
        if (batch.num_sequences > WARP_SIZE) chunks.load(batch, first);
        if (before + chunks.total > wanted) break;
        before += chunks.total;
    }
    const int owner = __ffs(__ballot_sync(FULL_WARP, before + chunks.end > wanted)) - 1;
    const int from_end = before + __shfl_sync(FULL_WARP, chunks.end, owner) - 1 - wanted;
    const int start = __shfl_sync(FULL_WARP, chunks.start, owner);
    const int num_tokens = __shfl_sync(FULL_WARP, chunks.num_tokens, owner);
    task.sequence = first + owner;
    const int context_len = __shfl_sync(FULL_WARP, chunks.context_len, owner);
    batch.describe(task.work, {start, num_tokens, context_len}, piece - wanted * batch.num_kv_heads, from_end * ROWS);
    task.take_part(batch.num_sequences);
    return task;
}
