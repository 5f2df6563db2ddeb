// gemv_w8: gemv with scaled 8-bit weights.
//
//   x of T with x_scale null, or e4m3 with x_scale float32 [M] (X_FP8, e4m3 weights)
//   weight_scale float32 [N], with BLOCK_SCALES [ceil(N / 128), ceil(K / 128)]; K a multiple of 16
//   grid, block, shared memory: as gemv
//   reference: NumpyOps.linear
//   roofline: N K bytes; 0.9 of copy bandwidth from 64 MB in e4m3, 0.8 with 16-bit x
#include "linear/w8_product.cuh"

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    gemv_w8(const X* x, const float* x_scale, const u8* weight, const float* weight_scale, const T* bias, Out* out,
            int num_rows, int n_size, int k_size) {
    GivenRows<X> rows{x};
    Gemv<u8, X>::run(rows, weight, out, num_rows, n_size, k_size, Product{x_scale, weight_scale, bias, k_size});
}
