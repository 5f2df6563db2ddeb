// layer_row: attention's output product, add_rms_norm, experts, add_rms_norm and the next layer's first product of one
// row in one launch.
//
//   x [K], output [H, K], residual, norm, next_norm [H], router [E, H], gate_up [E, 2 I, H], down [E, H, I], next [N, H]
//   (null: out is the norm), biases or null, out [N] or [H]; slots int64 [1] or null: outside 0..num_slots - 1 is padding,
//   without experts; arrays aligned to 16 bytes
//   words u64 [H + max(E, grid) + 1 + k I / 2], launches u32 [grid]: 0 before the first launch
//   grid (at most the SMs: all blocks must run at once), block (512), shared memory: rings of STAGES, HOLD stages, row,
//   gated rows, sums
//   reference: NumpyOps.layer_tail
//   roofline: H (K + E + 3 k I + N) elements: 114 MB for Qwen3-30B-A3B, 27 us on an H200
#define WHOLE_LAYER 1
#include "experts/one_row.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    layer_row(const T* x, const T* output, const T* output_bias, T* residual, const T* norm, const T* router,
              const T* gate_up, const T* down, const i64* slots, const T* next_norm, const T* next, const T* next_bias,
              T* out, u64* words, u32* launches, int renormalise, i64 num_slots, float eps) {
    run_row({x, output, output_bias, residual, norm, router, gate_up, down, slots, next_norm, next, next_bias, out, words,
             launches, renormalise, num_slots, eps});
}
