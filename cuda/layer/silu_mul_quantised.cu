// silu_mul_quantised: silu_mul, then quantise_rows.
//
//   gate_up [T, 2 I], out e4m3 [T, I], scale float32 [T]
//   grid (T), block (multiple of 32)
//   reference: NumpyOps.silu_mul_quantised
//   roofline: 2 T I elements read, T I bytes written; 0.6 of copy bandwidth at T = 4096
#include "common/fp8.cuh"
#include "layer/gated.cuh"

extern "C" __global__ void __launch_bounds__(1024)
    silu_mul_quantised(const T* gate_up, u8* out, float* scale, int width) {
    start_next_kernel();
    wait_for_previous_kernel();
    const T* gate = gate_up + 2 * static_cast<i64>(blockIdx.x) * width;
    const T* up = gate + width;
    u8* to = out + static_cast<i64>(blockIdx.x) * width;
    if (width % Vec<T>::SIZE == 0 && is_aligned_16(gate_up) && is_aligned_16(out) && fits_in_registers(width)) {
        Vec<T> held[HELD_VECS];
        for_each_vec(held, width, [=](Vec<T>& vec, int i) {
            const Vec<T> a = load_vec(gate + i), b = load_vec(up + i);
            vec = gated(a, b);
        });
        quantise_held(held, width, to, scale + blockIdx.x);
    } else {
        quantise_elements([=](int i) { return gated(gate[i], up[i]); }, width, to, scale + blockIdx.x);
    }
}
