// route_experts: each row's top-k experts (MoE), best first, ties by lower id, and their softmax over all.
//
//   logits float32 [T, E], ids int32 [T, k], weights float32 [T, k], over their sum if `renormalise`; k <= E
//   slots int64 [T] or null: outside 0..num_slots - 1 is padding: ids -1, weights 0; PER_LANE: ceil(E / 32), at most 32
//   grid (ceil(T / 8)), block (256): one warp per row
//   reference: NumpyOps.route_experts
//   roofline: T (4 E + 8 k) bytes; bound by k rounds of 5 shuffles, about 3 us
#include "experts/route_row.cuh"

extern "C" __global__ void __launch_bounds__(256)
    route_experts(const float* logits, const i64* slots, int* ids, float* weights, int num_rows, int num_experts,
                  int num_used, int renormalise, i64 num_slots) {
    start_next_kernel();
    wait_for_previous_kernel();
    const int row = blockIdx.x * (blockDim.x / WARP_SIZE) + threadIdx.x / WARP_SIZE;
    if (row >= num_rows) return;
    int* to_ids = ids + static_cast<i64>(row) * num_used;
    float* to_weights = weights + static_cast<i64>(row) * num_used;
    if (slots != nullptr && (slots[row] < 0 || slots[row] >= num_slots))
        route_padding(to_ids, to_weights, num_used);
    else
        route_row(logits + static_cast<i64>(row) * num_experts, to_ids, to_weights, num_experts, num_used, renormalise);
}
