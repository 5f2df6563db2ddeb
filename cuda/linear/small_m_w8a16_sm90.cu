// small_m_w8a16_sm90: out = x @ (weight * scale).T + bias with 8-bit weights on Hopper; close to the speed of reading
// them up to 64 rows.
//
//   x [M, K], weight [N, K], bias [N] or null, out [M, N]; COLS 32, 64, 96, 128, 192; K a multiple of 16
//   weight_scale float32 [N], with BLOCK_SCALES [ceil(N / 128), ceil(K / 128)]
//   grid: at most SPLIT blocks per tile; block THREADS
//   reference: NumpyOps.linear
//   roofline: N K bytes; 0.8 of copy bandwidth from 100 MB, up to M = 64
//
// Threads widen weights into wgmma's register operand. Block scales multiply them there, rounded to T; row scales
// multiply the sums.
#include "common/widen.cuh"

#define WEIGHT_ELEMENTS 128
#define X_BOXES 2
#define SCALE_BYTES 0
#include "common/wgmma_registers.cuh"
#include "linear/scaled_output.cuh"

constexpr int SCALE_BLOCK = 128;
static_assert(SPAN == SCALE_BLOCK, "a stage has one scale for a row");

#if QUIRE_DTYPE == 1
using Pair = __half2;
#else
using Pair = __nv_bfloat162;
#endif

__device__ __forceinline__ Pair as_pair(u32 bits) { return *reinterpret_cast<const Pair*>(&bits); }

// Block scales of rows g and g + 8 in a span.
struct BlockScales {
    u32 high[2], low[2];  // rounded to T, and the remainder; each duplicated

    __device__ __forceinline__ void split(const float (&scale)[2]) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float rounded = to_float(from_float<T>(scale[half]));
            high[half] = pack_pair(rounded, rounded);
            low[half] = pack_pair(scale[half] - rounded, scale[half] - rounded);
        }
    }
    __device__ __forceinline__ u32 times(u32 weights, int half) const {
        const Pair product =
            __hfma2(as_pair(weights), as_pair(high[half]), __hmul2(as_pair(weights), as_pair(low[half])));
        return *reinterpret_cast<const u32*>(&product);
    }
};

struct BlockScaleRows {
    const float* scale[2];

    __device__ __forceinline__ BlockScaleRows(const float* scales, int tile_row, int n_size, int k_size) {
        const int columns = (k_size + SCALE_BLOCK - 1) / SCALE_BLOCK;
        const int first = tile_row + threadIdx.x / WARP_SIZE * 16 + threadIdx.x % WARP_SIZE / 4;
#pragma unroll
        for (int half = 0; half < 2; ++half)
            scale[half] = scales + min(first + 8 * half, n_size - 1) / SCALE_BLOCK * columns;
    }
    __device__ __forceinline__ void load(float (&to)[2], int span) const {
        to[0] = __ldg(scale[0] + span);
        to[1] = __ldg(scale[1] + span);
    }
};

__device__ __forceinline__ u32 load_two(u32 address) {
    u16 two;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(two) : "r"(address) : "memory");
    return two;
}

// Widens 64 columns of a warp's 16 rows at `rows` in shared memory.
__device__ __forceinline__ void widen_half(Fragments& a, u32 rows, int half, const BlockScales& scales) {
    const int lane = threadIdx.x % WARP_SIZE, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int s = 0; s < 4; ++s) {
        const u32 at = rows + g * 128 + ((half * 4 + s) ^ g) * 16 + 2 * t;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            a[s][i] = widen<0>(load_two(at + i % 2 * 1024 + i / 2 * 8));
            if (BLOCK_SCALES) a[s][i] = scales.times(a[s][i], i % 2);
        }
    }
}

// Threads widen half a stage while the tensor cores multiply the other.
__device__ __forceinline__ void sum_widened(Sums& sum, const Shared& shared, const BlockWork& work, u32 iteration,
                                            const BlockScaleRows& block_scales) {
    const bool arrives = threadIdx.x % WARP_SIZE == 0;
    const u32 offset = threadIdx.x / WARP_SIZE * 16 * 128;
    Fragments even, odd = {};
    BlockScales scales = {};
    float next[2] = {};
    clear(sum);
    if (BLOCK_SCALES && work.num_spans > 0) block_scales.load(next, work.first_span);
    for (int n = 0; n < work.num_spans; ++n, ++iteration) {
        if (BLOCK_SCALES) {
            scales.split(next);
            block_scales.load(next, work.first_span + min(n + 1, work.num_spans - 1));
        }
        const u32 rows = shared.weights(iteration) + offset;
        wait_for(shared.full(iteration), shared.parity(iteration));
        widen_half(even, rows, 0, scales);
        start_products(sum, even, shared.x(iteration));
        wait_for_products<1>(sum);
        hold(odd);
        if (n > 0 && arrives) arrive(shared.empty(iteration - 1));
        widen_half(odd, rows, 1, scales);
        start_products(sum, odd, shared.x(iteration) + BOX_BYTES);
        wait_for_products<1>(sum);
        hold(even);
    }
    wait_for_products<0>(sum);
    hold(odd);
    if (work.num_spans > 0 && arrives) arrive(shared.empty(iteration - 1));
}

extern "C" __global__ void SMALL_M_CLUSTER __launch_bounds__(THREADS, 1)
    small_m_w8a16_sm90(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap weight_map,
                       const float* weight_scale, const T* bias, Out* out, int num_rows, int n_size, int k_size) {
    extern __shared__ unsigned char memory[];
    const Shared shared{(shared_address(memory) + 1023) / 1024 * 1024};
    const BlockWork work(n_size, k_size);
    if (!begin_block(shared, Producer{shared, work, weight_map, x_map, policy_of_read_once()})) return;
    for (int tile = 0; tile < work.num_tiles; ++tile) {
        const int row = work.first_row(tile);
        Sums sum;
        sum_widened(sum, shared, work, tile * work.num_spans, BlockScaleRows(weight_scale, row, n_size, k_size));
        const OutputTile output(out, 0, BLOCK_SCALES ? nullptr : weight_scale, bias, row, num_rows, n_size);
        store(sum, output, shared, work.split);
    }
}
