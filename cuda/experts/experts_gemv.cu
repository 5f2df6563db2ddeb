// experts_gemv: the product of expert_items.cuh in 16 bits, bound by reading the weights of the experts in use once
// while none has more than 8 COL_TILES rows.
//
//   A build defines WARPS, ROW_TILES, COL_TILES, SPAN, STAGES and OUT_FLOAT as for gemv.cu.
//   grid (up to P ceil(N / (16 ROW_TILES))), block (32 WARPS), dynamic shared memory: as for gemv, and 4 E bytes
//   reference: NumpyOps.experts_linear
//   needs: K a multiple of 8
//   roofline: U N K elements moved for U experts in use. Qwen3-30B-A3B in bf16, gate and up of 8 experts: 50 MB, 12 us
//   on an H200; of all 128: 805 MB, 190 us; 0.85 of copy bandwidth expected
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
