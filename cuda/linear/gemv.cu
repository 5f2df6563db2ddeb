// gemv: out[m] = x[m] @ weight.T + bias for a few rows; bound by reading the weights once.
//
//   x [M, K], weight [N, K], bias [N] or null, out [M, N]; M <= 8 COL_TILES
//   A build defines the macros of gemv.cuh; OUT_FLOAT: out is of the build's type (0) or float32 (1).
//   grid (up to ceil(N / (16 ROW_TILES))), block (32 WARPS), dynamic shared memory: rings, two sets of sums
//   reference: NumpyOps.linear
//   needs: x and weight aligned to 16 bytes, K a multiple of 8, 16-bit elements
//   roofline: N K elements moved; 0.9 of copy bandwidth from 64 MB of weights
#include "linear/dense_product.cuh"

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    gemv(const T* x, const T* weight, const T* bias, Out* out, int num_rows, int n_size, int k_size) {
    Gemv<T, T>::run(x, weight, out, num_rows, n_size, k_size, Product{bias});
}
