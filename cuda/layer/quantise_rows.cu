// quantise_rows: out = x / scale in e4m3, scale[t] = max(|x[t]|) / 448, at least 1e-12; not finite if the row is not.
//
//   x [T, K], out e4m3 [T, K], scale float32 [T]
//   grid (T), block (multiple of 32)
//   reference: NumpyOps.quantise_rows, bit for bit
//   roofline: T K elements read, T K bytes written; 0.9 of copy bandwidth from T = 8192
#include "common/fp8.cuh"

extern "C" __global__ void __launch_bounds__(1024) quantise_rows(const T* x, u8* out, float* scale, int width) {
    start_next_kernel();
    wait_for_previous_kernel();
    const i64 start = static_cast<i64>(blockIdx.x) * width;
    const T* row = x + start;
    if (width % Vec<T>::SIZE == 0 && is_aligned_16(x) && is_aligned_16(out) && fits_in_registers(width)) {
        Vec<T> held[HELD_VECS];
        for_each_vec(held, width, [row](Vec<T>& vec, int i) { vec = load_vec(row + i); });
        quantise_held(held, width, out + start, scale + blockIdx.x);
    } else {
        quantise_elements([row](int i) { return row[i]; }, width, out + start, scale + blockIdx.x);
    }
}
