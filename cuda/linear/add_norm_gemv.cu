// add_norm_gemv: residual += x, rounded to T; out = rms_norm(residual) @ weight.T + bias, for one row.
//
//   x, residual, norm [K], weight [N, K], bias [N] or null, out [N]; aligned to 16 bytes, K a multiple of 8 up to
//   8 blockDim.x
//   grid (up to ceil(N / (16 ROW_TILES)), all resident at once), block (32 WARPS), shared memory: as gemv, and the row
//   reference: NumpyOps.add_rms_norm, NumpyOps.linear, with the bits of add_rms_norm and gemv
//   roofline: N K elements
#include "linear/dense_product.cuh"
#include "linear/normed_row.cuh"

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    add_norm_gemv(const T* x, T* residual, const T* norm, const T* weight, const T* bias, Out* out, int n_size, int k_size,
                  float eps) {
    NormedRow row{x, residual, norm, eps};
    Gemv<T, T>::run(row, weight, out, 1, n_size, k_size, Product{bias});
    if (FILL) row.finish(k_size);
}
