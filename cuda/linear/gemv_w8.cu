// gemv_w8: out[m] = x[m] @ (weight * its scales).T + bias: gemv with weights of 8 bits.
//
//   x of the build's type with x_scale null (X_FP8 0) or e4m3 with x_scale float32 [M] (X_FP8 1, e4m3 weights);
//   weight_scale float32 [N], or [ceil(N / 128), ceil(K / 128)] with BLOCK_SCALES
//   A build defines the macros of gemv.cu, WEIGHT_INT8 (widen.cuh), X_FP8 and BLOCK_SCALES.
//   grid, block, shared memory: as for gemv
//   reference: NumpyOps.linear
//   needs: x and weight aligned to 16 bytes, K a multiple of 16
//   roofline: N K bytes moved; 0.9 of copy bandwidth from 64 MB of weights in e4m3, 0.8 with x of 16 bits
#include "linear/w8_product.cuh"

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    gemv_w8(const X* x, const float* x_scale, const u8* weight, const float* weight_scale, const T* bias, Out* out,
            int num_rows, int n_size, int k_size) {
    Gemv<u8, X>::run(x, weight, out, num_rows, n_size, k_size, Product{x_scale, weight_scale, bias, k_size});
}
