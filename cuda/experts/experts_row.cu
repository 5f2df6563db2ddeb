// experts_row: add_rms_norm of one row, router, experts and their weighted sum in one launch.
//
//   x, residual, norm [H], router [E, H], gate_up [E, 2 I, H], down [E, H, I], out [H]; slots int64 [1] or null:
//   outside 0..num_slots - 1 is padding, out 0; arrays aligned to 16 bytes
//   words u64 [H + max(E, grid) + 1 + k I / 2], launches u32 [grid]: 0 before the first launch
//   grid (at most the SMs: all blocks must run at once), block (512), shared memory: rings of STAGES, row, gated rows,
//   sums
//   reference: NumpyOps.add_norm_experts
//   roofline: 3 k H I elements: 75 MB for Qwen3-30B-A3B, 18 us on an H200
#define WHOLE_LAYER 0
#include "experts/one_row.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    experts_row(const T* x, T* residual, const T* norm, const T* router, const T* gate_up, const T* down, const i64* slots,
                T* out, u64* words, u32* launches, int renormalise, i64 num_slots, float eps) {
    run_row({x, nullptr, nullptr, residual, norm, router, gate_up, down, slots, nullptr, nullptr, nullptr, out, words,
             launches, renormalise, num_slots, eps});
}
