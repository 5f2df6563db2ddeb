// experts_gemv: MoE grouped GEMV (expert_items.cuh) in 16 bits; an expert with up to 8 COL_TILES rows is read once.
//
//   grid (up to P ceil(N / (16 ROW_TILES))), block (32 WARPS), shared memory: as gemv, and 4 E bytes; K a multiple of 8
//   reference: NumpyOps.experts_linear
//   roofline: U N K elements for U experts in use: Qwen3-30B-A3B, bf16, gate and up of 8 / 128 experts: 12 / 190 us on
//   an H200; 0.85 of copy bandwidth expected
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
