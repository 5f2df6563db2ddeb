// experts_gemv_w8: out[p] = x[row of p] @ (weight[expert of p] * its scales).T for sorted pairs, with weights of 8 bits;
// bound by reading the weights of the experts in use once, while none has more than 8 COL_TILES rows.
//
//   x [T, K] with rows int32 [P], or [P, K] with null: of the build's type with x_scale null (X_FP8 0), or e4m3 with
//   x_scale float32 [rows of x] (X_FP8 1, e4m3 weights); weight [E, N, K]; weight_scale float32 [E, N], or
//   [E, ceil(N / 128), ceil(K / 128)] with BLOCK_SCALES; offsets int32 [E + 1]; out [P, N]; E <= 1024
//   A build defines WARPS, ROW_TILES, COL_TILES, SPAN, STAGES, OUT_FLOAT, WEIGHT_INT8, X_FP8 and BLOCK_SCALES as for
//   gemv_w8.cu.
//   grid (up to P ceil(N / (16 ROW_TILES))), block (32 WARPS), dynamic shared memory: as for gemv_w8, and 4 E bytes
//   reference: NumpyOps.experts_linear
//   needs: x and weight aligned to 16 bytes, K a multiple of 16
//   roofline: U N K bytes moved for U experts in use, ceil(n / (8 COL_TILES)) times for one of n rows. Qwen3-30B-A3B, gate
//   and up of 8 experts: 25 MB, 6 us on an H200; of all 128: 403 MB, 95 us; 0.8 of copy bandwidth expected
//
// The order of an element's sums depends on K and the build alone: a row gives the same bits with any other rows.
#include "experts/grouped_gemv.cuh"
#include "linear/w8_product.cuh"

struct ExpertProduct : Product {
    const float* of_all;  // experts

    __device__ __forceinline__ void begin_item(int expert, int n_size) {
        const int scales =
            BLOCK_SCALES ? (n_size + SCALE_BLOCK - 1) / SCALE_BLOCK * ((k_size + SCALE_BLOCK - 1) / SCALE_BLOCK) : n_size;
        weight_scale = of_all + static_cast<i64>(expert) * scales;
    }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    experts_gemv_w8(const X* x, const float* x_scale, const int* rows, const u8* weight, const float* weight_scale,
                    const int* offsets, Out* out, int num_experts, int n_size, int k_size) {
    ExpertProduct product{{x_scale, weight_scale, nullptr, k_size}, weight_scale};
    ExpertGemv<u8, X>::run(x, rows, weight, offsets, out, num_experts, n_size, k_size, product);
}
