// route_experts: the k most probable experts of each row, best first, ties by lower id, and their softmax over all experts.
//
//   logits float32 [T, E], ids int32 [T, k], weights float32 [T, k], divided by their sum if `renormalise`; k <= E; slots
//   int64 [T] or null: a row whose slot is outside 0..num_slots - 1 is padding, with ids of -1 and weights of 0
//   A build defines PER_LANE: ceil(E / 32), at most 32.
//   grid (ceil(T / 8)), block (256): a warp a row
//   reference: NumpyOps.route_experts
//   roofline: T (4 E + 8 k) bytes moved, 0.3 MB for T = 512 of Qwen3-30B-A3B; bound by k rounds of 5 shuffles, about 3 us
#include "common/types.cuh"

// A number for (logit, id) that is larger for a better expert, never 0; NaN is below all others.
__device__ __forceinline__ u64 rank_of(float logit, int id) {
    const u32 bits = __float_as_uint(logit + 0.0f);  // both zeros tie
    const u32 ordered = isnan(logit) ? 0u : bits >> 31 ? ~bits : bits | 0x80000000u;
    return static_cast<u64>(ordered) << 32 | ~static_cast<u32>(id);
}

extern "C" __global__ void __launch_bounds__(256)
    route_experts(const float* logits, const i64* slots, int* ids, float* weights, int num_rows, int num_experts,
                  int num_used, int renormalise, i64 num_slots) {
    start_next_kernel();
    wait_for_previous_kernel();
    const int row = blockIdx.x * (blockDim.x / WARP_SIZE) + threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    if (row >= num_rows) return;
    int* to_ids = ids + static_cast<i64>(row) * num_used;
    float* to_weights = weights + static_cast<i64>(row) * num_used;
    if (slots != nullptr && (slots[row] < 0 || slots[row] >= num_slots)) {
        for (int j = lane; j < num_used; j += WARP_SIZE) {
            to_ids[j] = -1;
            to_weights[j] = 0.0f;
        }
        return;
    }
    const float* from = logits + static_cast<i64>(row) * num_experts;
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
