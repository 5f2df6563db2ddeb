// pick_tokens: token_ids[i] = previous[source[i]] where 0 <= source[i] < num_previous.
//
//   token_ids, source int32 [T], previous int32 [P]; grid (ceil(T / 256)), block (256)
//   reference: NumpyOps.pick_tokens; roofline: none, one launch
#include "common/types.cuh"

extern "C" __global__ void __launch_bounds__(256)
    pick_tokens(int* token_ids, const int* previous, const int* source, int num_tokens, int num_previous) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= num_tokens) return;
    const int from = source[i];
    if (from >= 0 && from < num_previous) token_ids[i] = previous[from];
}
