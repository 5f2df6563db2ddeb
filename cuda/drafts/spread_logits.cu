// spread_logits: out[r, v] = logits[r, columns[v]], -inf if columns[v] is outside 0..N-1.
//
//   logits float32 [R, N], columns int32 [V], out float32 [R, V]
//   grid (R, ceil(V / 1024)), block (256)
//   reference: NumpyOps.spread_logits; roofline: 4 R V bytes written
#include "common/types.cuh"

extern "C" __global__ void __launch_bounds__(256)
    spread_logits(const float* logits, const int* columns, float* out, int num_columns, int vocab_size) {
    start_next_kernel();
    const int first = blockIdx.y * 4 * blockDim.x + threadIdx.x;
    int from[4];
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const int token = first + n * blockDim.x;
        from[n] = token < vocab_size ? columns[token] : -1;
    }
    wait_for_previous_kernel();
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const int token = first + n * blockDim.x;
        const bool is_known = from[n] >= 0 && from[n] < num_columns;
        const float value = is_known ? logits[static_cast<i64>(blockIdx.x) * num_columns + from[n]] : 0.0f;
        if (token < vocab_size) out[static_cast<i64>(blockIdx.x) * vocab_size + token] = is_known ? value : -positive_infinity();
    }
}
