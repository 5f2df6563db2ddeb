// combine_experts: MoE output out[t] = sum over j of weights[t, j] * x[places[t, j]], in float32 from j = 0 on.
//
//   x [P, H] of sorted pairs, places int32 [T, k] (-1: none), weights float32 [T, k], out [T, H]
//   grid (T), block (256); arrays of any alignment
//   reference: NumpyOps.combine_experts
//   roofline: T (k + 1) H elements; 0.8 of copy bandwidth from 16 MB
#include "common/types.cuh"

constexpr int AT_ONCE = 8;  // loads in flight per thread

extern "C" __global__ void __launch_bounds__(256)
    combine_experts(const T* x, const int* places, const float* weights, T* out, int num_used, int width) {
    start_next_kernel();
    wait_for_previous_kernel();
    constexpr int SIZE = Vec<T>::SIZE;
    const int* from = places + static_cast<i64>(blockIdx.x) * num_used;
    const float* by = weights + static_cast<i64>(blockIdx.x) * num_used;
    T* to = out + static_cast<i64>(blockIdx.x) * width;
    if (width % SIZE == 0 && is_aligned_16(x) && is_aligned_16(out)) {
        for (int i = threadIdx.x * SIZE; i < width; i += blockDim.x * SIZE) {
            float sum[SIZE] = {};
            for (int first = 0; first < num_used; first += AT_ONCE) {
                Vec<T> vecs[AT_ONCE];
                int places[AT_ONCE];
#pragma unroll
                for (int j = 0; j < AT_ONCE; j++) places[j] = first + j < num_used ? from[first + j] : -1;
#pragma unroll
                for (int j = 0; j < AT_ONCE; j++)
                    if (places[j] >= 0) vecs[j] = load_vec(x + static_cast<i64>(places[j]) * width + i);
#pragma unroll
                for (int j = 0; j < AT_ONCE; j++) {
                    if (places[j] < 0) continue;
                    const float weight = by[first + j];
#pragma unroll
                    for (int n = 0; n < SIZE; n++) sum[n] = fmaf(weight, to_float(vecs[j].at[n]), sum[n]);
                }
            }
            Vec<T> total;
#pragma unroll
            for (int n = 0; n < SIZE; n++) total.at[n] = from_float<T>(sum[n]);
            store_vec(to + i, total);
        }
    } else {
        for (int i = threadIdx.x; i < width; i += blockDim.x) {
            float sum = 0.0f;
            for (int j = 0; j < num_used; j++)
                if (from[j] >= 0) sum = fmaf(by[j], to_float(x[static_cast<i64>(from[j]) * width + i]), sum);
            to[i] = from_float<T>(sum);
        }
    }
}
