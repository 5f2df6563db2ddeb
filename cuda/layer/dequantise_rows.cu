// dequantise_rows: out[t] = x[t] * scale[t].
//
//   x e4m3 [T, K], scale float32 [T], out [T, K]
//   grid (T, ceil(K / 4096)), block (256); without 16-byte alignment a thread takes its elements one by one
//   reference: NumpyOps.dequantise_rows, equal in every bit
//   roofline: T K bytes read, T K elements written; 0.85 of copy bandwidth from 32 MB on
#include "common/fp8.cuh"

__device__ __forceinline__ float widened(u8 x) {
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(x, __NV_E4M3)));
}

extern "C" __global__ void __launch_bounds__(256) dequantise_rows(const u8* x, const float* scale, T* out, int width) {
    start_next_kernel();
    wait_for_previous_kernel();
    constexpr int TAKEN = 16, SIZE = Vec<T>::SIZE;
    const int i = (blockIdx.y * blockDim.x + threadIdx.x) * TAKEN;
    if (i >= width) return;
    const i64 start = static_cast<i64>(blockIdx.x) * width + i;
    const float by = scale[blockIdx.x];
    if (width % TAKEN == 0 && is_aligned_16(x) && is_aligned_16(out)) {
        const Vec<u8> from = load_vec(x + start);
#pragma unroll
        for (int n = 0; n < TAKEN; n += SIZE) {
            Vec<T> to;
#pragma unroll
            for (int j = 0; j < SIZE; j++) to.at[j] = from_float<T>(widened(from.at[n + j]) * by);
            store_vec(out + start + n, to);
        }
    } else {
        for (int j = 0; j < min(TAKEN, width - i); j++) out[start + j] = from_float<T>(widened(x[start + j]) * by);
    }
}
