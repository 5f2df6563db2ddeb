// experts_gemv_w8: experts_gemv with scaled 8-bit weights.
//
//   x and x_scale [rows of x] as in gemv_w8
//   weight_scale float32 [E, N], with BLOCK_SCALES [E, ceil(N / 128), ceil(K / 128)]
//   grid, block, shared memory: as experts_gemv; K a multiple of 16
//   reference: NumpyOps.experts_linear
//   roofline: U N K bytes: Qwen3-30B-A3B, gate and up of 8 / 128 experts: 6 / 95 us on an H200; 0.8 of copy bandwidth
//   expected
#include "experts/grouped_gemv.cuh"
#include "linear/w8_product.cuh"

struct ExpertProduct : Product {
    const float* of_all;  // scales of all experts

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
