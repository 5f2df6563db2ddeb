// MoE routing of one row of logits by one warp.
#pragma once

#include "experts/rank_of.cuh"

// Called by a whole warp.
__device__ __forceinline__ void route_row(const float* from, int* to_ids, float* to_weights, int num_experts, int num_used,
                                          int renormalise) {
    const int lane = threadIdx.x % WARP_SIZE;
    float own[PER_LANE], largest = -positive_infinity();
    u32 ranks[PER_LANE];
#pragma unroll
    for (int n = 0; n < PER_LANE; n++) {
        const int id = n * WARP_SIZE + lane;
        own[n] = id < num_experts ? from[id] : -positive_infinity();
        ranks[n] = id < num_experts ? rank_of(own[n]) : 0;
        largest = fmaxf(largest, own[n]);
    }
    largest = warp_max(largest);
    float total = 0.0f;
#pragma unroll
    for (int n = 0; n < PER_LANE; n++)
        if (n * WARP_SIZE + lane < num_experts) total += expf(own[n] - largest);
    total = warp_sum(total);

    float sum = 0.0f;
#pragma unroll 1
    for (int j = 0; j < num_used; j++) {
        u32 best = 0, id = num_experts;
#pragma unroll
        for (int n = 0; n < PER_LANE; n++) best = max(best, ranks[n]);
        best = __reduce_max_sync(FULL_WARP, best);
#pragma unroll
        for (int n = PER_LANE - 1; n >= 0; n--)
            if (ranks[n] == best) id = n * WARP_SIZE + lane;
        id = __reduce_min_sync(FULL_WARP, id);
        float chosen = 0.0f;
#pragma unroll
        for (int n = 0; n < PER_LANE; n++) {
            if (id != n * WARP_SIZE + lane) continue;
            ranks[n] = 0;
            chosen = own[n];
        }
        const float weight = expf(__shfl_sync(FULL_WARP, chosen, id % WARP_SIZE) - largest) / total;
        sum += weight;
        if (lane == 0) {
            to_ids[j] = id;
            to_weights[j] = weight;
        }
    }
    if (!renormalise) return;
    __syncwarp();
#pragma unroll 1
    for (int j = lane; j < num_used; j += WARP_SIZE) to_weights[j] /= sum;
}

__device__ __forceinline__ void route_padding(int* to_ids, float* to_weights, int num_used) {
    for (int j = threadIdx.x % WARP_SIZE; j < num_used; j += WARP_SIZE) {
        to_ids[j] = -1;
        to_weights[j] = 0.0f;
    }
}

// group_by_expert for at most blockDim.x pairs, `ids` in shared memory. Called by the whole block.
__device__ __forceinline__ void group_few(const int* ids, int* rows, int* places, int* offsets, int num_pairs,
                                          int num_experts, int num_used) {
    const int pair = threadIdx.x;
    if (pair < num_pairs) {
        const int id = ids[pair];
        int place = 0;
#pragma unroll 4
        for (int other = 0; other < num_pairs; other++)
            place += ids[other] >= 0 && (ids[other] < id || (ids[other] == id && other < pair));
        places[pair] = id < 0 ? -1 : place;
        if (id >= 0) rows[place] = pair / num_used;
    }
#pragma unroll 1
    for (int e = threadIdx.x; e <= num_experts; e += blockDim.x) {
        int before = 0;
#pragma unroll 4
        for (int other = 0; other < num_pairs; other++) before += ids[other] >= 0 && ids[other] < e;
        offsets[e] = before;
    }
}
