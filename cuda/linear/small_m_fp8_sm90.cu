// small_m_fp8_sm90: out = (x @ weight.T) * x_scale * weight_scale + bias in e4m3 on Hopper, bound by weight reads up to
// 128 rows.
//
//   x e4m3 [M, K], x_scale float32 [M], weight e4m3 [N, K], weight_scale float32 [N], bias [N] or null, out [M, N]
//   COLS 16, 32, 64, 96, 128, 192, 256; K a multiple of 16
//   grid: at most SPLIT blocks per tile; block THREADS
//   reference: NumpyOps.linear
//   roofline: N K bytes; 0.9 of copy bandwidth from 100 MB, up to M = 64
#define WEIGHT_ELEMENTS 128
#define X_BOXES 1
#define SCALE_BYTES (COLS * 4)
#include "linear/small_m.cuh"
#include "linear/scaled_output.cuh"

// Copies scales to shared memory: stores would wait for them from global memory.
__device__ __forceinline__ void keep_scales(const Shared& shared, const float* x_scale, int num_rows) {
    for (int m = threadIdx.x; m < COLS; m += CONSUMERS) {
        const float scale = m < num_rows ? x_scale[m] : 0.0f;
        asm volatile("st.shared.f32 [%0], %1;" : : "r"(shared.x_scales() + 4 * m), "f"(scale) : "memory");
    }
}

struct Stage {
    static __device__ __forceinline__ void multiply(Sums& sum, u32 weights, u32 x) {
#pragma unroll
        for (int k = 0; k < 128; k += 32) multiply_add_e4m3(sum, operand(weights + k, 0), operand(x + k, 0));
    }
};

extern "C" __global__ void SMALL_M_CLUSTER __launch_bounds__(THREADS, 1)
    small_m_fp8_sm90(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap weight_map,
                     const float* x_scale, const float* weight_scale, const T* bias, Out* out, int num_rows, int n_size,
                     int k_size) {
    extern __shared__ unsigned char memory[];
    const Shared shared{(shared_address(memory) + 1023) / 1024 * 1024};
    const BlockWork work(n_size, k_size);
    if (!begin_block(shared, Producer{shared, work, weight_map, x_map, policy_of_read_once()})) return;
    keep_scales(shared, x_scale, num_rows);
    for (int tile = 0; tile < work.num_tiles; ++tile) {
        const OutputTile output(out, shared.x_scales(), weight_scale, bias, work.first_row(tile), num_rows, n_size);
        Sums sum;
        sum_tile<Stage>(sum, shared, work, tile * work.num_spans);
        if (tile == 0) sync_named_barrier(1, CONSUMERS);  // the scales are complete
        store(sum, output, shared, work.split);
    }
}
