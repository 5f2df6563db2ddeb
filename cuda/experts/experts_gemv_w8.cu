// experts_gemv_w8: experts_gemv with weights of 8 bits, times their scales.
//
//   x of the build's type with x_scale null (X_FP8 0), or e4m3 with x_scale float32 [rows of x] (X_FP8 1, e4m3
//   weights); weight_scale float32 [E, N], or [E, ceil(N / 128), ceil(K / 128)] with BLOCK_SCALES
//   A build defines WARPS, ROW_TILES, COL_TILES, SPAN, STAGES, OUT_FLOAT, WEIGHT_INT8, X_FP8 and BLOCK_SCALES as for
//   gemv_w8.cu.
//   grid (up to P ceil(N / (16 ROW_TILES))), block (32 WARPS), dynamic shared memory: as for gemv_w8, and 4 E bytes
//   reference: NumpyOps.experts_linear
//   needs: K a multiple of 16
//   roofline: U N K bytes moved for U experts in use. Qwen3-30B-A3B, gate and up of 8 experts: 25 MB, 6 us on an H200;
//   of all 128: 403 MB, 95 us; 0.8 of copy bandwidth expected
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
