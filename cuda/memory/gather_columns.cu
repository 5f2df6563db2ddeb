// gather_columns: out[m, k] = x[m, order[k]], for weights sorted by group (GPTQ's desc_act).
//
//   x, out [M, K], order int32 [K]; grid (M, ceil(K / block))
//   reference: x[:, order]; roofline: 2 M K elements; few rows come from L2
#include "common/types.cuh"

extern "C" __global__ void gather_columns(const T* x, const int* order, T* out, int width) {
    const int k = blockIdx.y * blockDim.x + threadIdx.x;
    const i64 row = static_cast<i64>(blockIdx.x) * width;
    start_next_kernel();
    const int from = k < width ? order[k] : 0;
    wait_for_previous_kernel();
    if (k < width) out[row + k] = from >= 0 && from < width ? x[row + from] : from_float<T>(0.0f);
}
