// silu_mul: out[t, i] = silu(gate_up[t, i]) * gate_up[t, I + i].
//
//   gate_up [T, 2 I], out [T, I]
//   grid (T, ceil(I / (256 vectors))), block (256)
//   reference: NumpyOps.silu_mul
//   roofline: 3 T I elements; 0.85 of copy bandwidth from T = 512
#include "layer/gated.cuh"

extern "C" __global__ void __launch_bounds__(256) silu_mul(const T* gate_up, T* out, int width) {
    start_next_kernel();
    wait_for_previous_kernel();
    constexpr int SIZE = Vec<T>::SIZE;
    const T* gate = gate_up + 2 * static_cast<i64>(blockIdx.x) * width;
    const T* up = gate + width;
    T* to = out + static_cast<i64>(blockIdx.x) * width;
    const int i = (blockIdx.y * blockDim.x + threadIdx.x) * SIZE;
    if (i >= width) return;

    if (width % SIZE == 0 && is_aligned_16(gate_up) && is_aligned_16(out)) {
        const Vec<T> a = load_vec(gate + i), b = load_vec(up + i);
        Vec<T> product;
#pragma unroll
        for (int j = 0; j < SIZE; j++) product.at[j] = gated(a.at[j], b.at[j]);
        store_vec(to + i, product);
    } else {
        for (int j = i; j < min(i + SIZE, width); j++) to[j] = gated(gate[j], up[j]);
    }
}
