// gemv: out = x @ weight.T + bias for up to 8 COL_TILES rows.
//
//   x [M, K], weight [N, K], bias [N] or null, out [M, N]; x and weight aligned to 16 bytes, K a multiple of 8
//   grid (up to ceil(N / (16 ROW_TILES))), block (32 WARPS), shared memory: rings, two sets of sums, x if SHARES_ROWS
//   reference: NumpyOps.linear
//   roofline: N K elements; 0.9 of copy bandwidth from 64 MB
#if GATED_ROWS
#include "layer/gated.cuh"
#endif
#include "linear/dense_product.cuh"

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    gemv(const T* x, const T* weight, const T* bias, Out* out, int num_rows, int n_size, int k_size) {
#if SHARES_ROWS
    SharedRows<T> rows{x, num_rows};
#else
    GivenRows<T> rows{x};
#endif
    Gemv<T, T>::run(rows, weight, out, num_rows, n_size, k_size, Product{bias});
}
