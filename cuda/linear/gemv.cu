// gemv: out[m] = x[m] @ weight.T + bias for a few rows; bound by reading the weights once.
//
//   x [M, K], weight [N, K], bias [N] or null, out [M, N]; M <= 8 COL_TILES
//   A build defines WARPS (a block), ROW_TILES (weight rows of a tile, in sixteens), COL_TILES (rows of x, in eights),
//   SPAN (elements of K in a warp's step), STAGES (of a warp's ring in shared memory), OUT_FLOAT: out has the build's
//   type (0) or float32 (1).
//   grid (up to ceil(N / (16 ROW_TILES))), block (32 WARPS), dynamic shared memory: rings, two sets of sums
//   reference: NumpyOps.linear
//   needs: x and weight aligned to 16 bytes, K a multiple of 8, 16-bit elements
//   roofline: N K elements moved; 0.9 of copy bandwidth from 64 MB of weights
#include "linear/gemv.cuh"

struct Product {
    const T* bias;

    using Operand = uint4;

    __device__ __forceinline__ void begin_span(int, int) {}
    __device__ __forceinline__ void end_span(GemvSums&) {}
    __device__ __forceinline__ void widen(uint4& to, uint4 from) const { to = from; }
    __device__ __forceinline__ void widen_x(uint4& to, const uint4 (&from)[1]) const { to = from[0]; }

    // An mma sums over 16 elements of K in any order: where weight and x agree, a lane's fragments can be the 16 bytes
    // that lie together in memory.
    __device__ __forceinline__ void multiply(GemvSums& sum, int i, int j, uint4 low, uint4 high, uint4 x) const {
        const u32 first[4] = {low.x, high.x, low.y, high.y};
        const u32 second[4] = {low.z, high.z, low.w, high.w};
        mma_16x8x16(sum[i][j], first, x.x, x.y);
        mma_16x8x16(sum[i][j], second, x.z, x.w);
    }
    __device__ __forceinline__ float start(int n) const { return bias == nullptr ? 0.0f : to_float(bias[n]); }
    __device__ __forceinline__ float finish(float total, int, int) const { return total; }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    gemv(const T* x, const T* weight, const T* bias, Out* out, int num_rows, int n_size, int k_size) {
    Gemv<T, T>::run(x, weight, out, num_rows, n_size, k_size, Product{bias});
}
