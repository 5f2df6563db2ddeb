// experts_gemv: out[p] = x[row of p] @ weight[expert of p].T for sorted pairs of rows and experts; bound by reading the
// weights of the experts in use once, while none has more than 8 COL_TILES rows.
//
//   x [T, K] with rows int32 [P], or [P, K] with null; weight [E, N, K]; offsets int32 [E + 1]; out [P, N]; E <= 1024
//   A build defines WARPS, ROW_TILES, COL_TILES, SPAN, STAGES and OUT_FLOAT as for gemv.cu.
//   grid (up to P ceil(N / (16 ROW_TILES))), block (32 WARPS), dynamic shared memory: as for gemv, and 4 E bytes
//   reference: NumpyOps.experts_linear
//   needs: x and weight aligned to 16 bytes, K a multiple of 8, 16-bit elements
//   roofline: U N K elements moved for U experts in use, ceil(n / (8 COL_TILES)) times for one of n rows. Qwen3-30B-A3B in
//   bf16, gate and up of 8 experts: 50 MB, 12 us on an H200; of all 128: 805 MB, 190 us; 0.85 of copy bandwidth expected
//
// The order of an element's sums depends on K and the build alone: a row gives the same bits with any other rows.
#include "experts/grouped_gemv.cuh"
#include "linear/dense_product.cuh"

struct ExpertProduct : Product {
    __device__ __forceinline__ void begin_item(int, int) {}
};

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    experts_gemv(const T* x, const int* rows, const T* weight, const int* offsets, Out* out, int num_experts, int n_size,
                 int k_size) {
    ExpertGemv<T, T>::run(x, rows, weight, offsets, out, num_experts, n_size, k_size, ExpertProduct{{nullptr}});
}
