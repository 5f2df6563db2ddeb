// The routing of a row of logits by one warp, for route_experts and route_few.
#pragma once

#include "common/types.cuh"

// A number for (logit, id) that is larger for a better expert, never 0; NaN is below all others.
__device__ __forceinline__ u64 rank_of(float logit, int id) {
    const u32 bits = __float_as_uint(logit + 0.0f);  // both zeros tie
    const u32 ordered = isnan(logit) ? 0u : bits >> 31 ? ~bits : bits | 0x80000000u;
    return static_cast<u64>(ordered) << 32 | ~static_cast<u32>(id);
}

// Writes the row's best experts to `to_ids` and their weights; every lane of the warp calls. `from` is a row of logits.
__device__ __forceinline__ void route_row(const float* from, int* to_ids, float* to_weights, int num_experts, int num_used,
                                          int renormalise) {
    const int lane = threadIdx.x % WARP_SIZE;
    float own[PER_LANE], largest = -positive_infinity();
    u64 ranks[PER_LANE];
#pragma unroll
    for (int n = 0; n < PER_LANE; n++) {
        const int id = n * WARP_SIZE + lane;
        own[n] = id < num_experts ? from[id] : -positive_infinity();
        ranks[n] = id < num_experts ? rank_of(own[n], id) : 0;
        largest = fmaxf(largest, own[n]);
    }
    largest = warp_max(largest);
    float total = 0.0f;
#pragma unroll
    for (int n = 0; n < PER_LANE; n++)
        if (n * WARP_SIZE + lane < num_experts) total += expf(own[n] - largest);
    total = warp_sum(total);

    float sum = 0.0f;
    for (int j = 0; j < num_used; j++) {
        u64 best = 0;
#pragma unroll
        for (int n = 0; n < PER_LANE; n++) best = ranks[n] > best ? ranks[n] : best;
        best = warp_max(best);
        const int id = static_cast<int>(~static_cast<u32>(best));
        float chosen = 0.0f;
#pragma unroll
        for (int n = 0; n < PER_LANE; n++) {
            if (ranks[n] != best) continue;
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
    for (int j = lane; j < num_used; j += WARP_SIZE) to_weights[j] /= sum;
}

// Writes a row of padding.
__device__ __forceinline__ void route_padding(int* to_ids, float* to_weights, int num_used) {
    for (int j = threadIdx.x % WARP_SIZE; j < num_used; j += WARP_SIZE) {
        to_ids[j] = -1;
        to_weights[j] = 0.0f;
    }
}
