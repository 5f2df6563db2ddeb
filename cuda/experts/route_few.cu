// route_few: route_experts and group_by_expert in one launch, for T <= 8 rows and k <= 32.
//
//   grid (1), block (256): one warp per row, then one thread per pair
//   reference: NumpyOps.route_to_groups
//   roofline: none; one launch of about 4 us instead of two
#include "experts/route_row.cuh"

constexpr int MAX_ROWS = 8;
constexpr int MAX_PAIRS = MAX_ROWS * WARP_SIZE;

extern "C" __global__ void __launch_bounds__(WARP_SIZE * MAX_ROWS)
    route_few(const float* logits, const i64* slots, float* weights, int* rows, int* places, int* offsets, int num_rows,
              int num_experts, int num_used, int renormalise, i64 num_slots) {
    __shared__ int ids[MAX_PAIRS];
    start_next_kernel();
    wait_for_previous_kernel();
    const int row = threadIdx.x / WARP_SIZE;
    if (row < num_rows) {
        int* to_ids = ids + row * num_used;
        float* to_weights = weights + row * num_used;
        if (slots != nullptr && (slots[row] < 0 || slots[row] >= num_slots))
            route_padding(to_ids, to_weights, num_used);
        else
            route_row(logits + static_cast<i64>(row) * num_experts, to_ids, to_weights, num_experts, num_used,
                      renormalise);
    }
    __syncthreads();
    group_few(ids, rows, places, offsets, num_rows * num_used, num_experts, num_used);
}
