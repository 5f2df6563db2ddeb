// lora_shrink_few: lora_shrink for tiles of at most 16 rows, in so few registers and bytes of shared memory that blocks of
// small_m_lora_sm90 begin beside it.
//
//   arguments as in lora_shrink, in splits of SPLIT_INPUTS; R a multiple of 16
//   grid (P R / 16, G, C), block 128: four warps take 64 inputs in turn
//   reference: NumpyOps.lora_shrink; undefined beyond the rank
//   roofline: as lora_shrink
#include "common/mma.cuh"

constexpr int WARPS = 4;
constexpr int SPLIT_INPUTS = 1024;
constexpr int CHUNK = 64;
constexpr int STEP = WARPS * CHUNK;
constexpr int STEPS = SPLIT_INPUTS / STEP;
constexpr int PREFETCHED = 1;  // steps in registers before the previous kernel ends; the others go to the L2
constexpr int GROUP = 2;       // steps whose inputs are loaded at once
constexpr int RANKS = 16;
constexpr int TILE_ROWS = 16;
constexpr int STRIDE = RANKS + 4;  // of sums in shared memory: no bank conflicts

__device__ __forceinline__ uint4 load_once(const T* from) {
    uint4 values;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(values.x), "=r"(values.y), "=r"(values.z), "=r"(values.w)
                 : "l"(from));
    return values;
}

struct Weights {
    uint4 near[2], far[2];

    __device__ __forceinline__ void load(const T* from, int num_inputs, int k, int end) {
        const int t = threadIdx.x % 4;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int at = k + 32 * half + 8 * t;
            near[half] = at < end ? load_once(from + at) : uint4{};
            far[half] = at < end ? load_once(from + 8 * static_cast<i64>(num_inputs) + at) : uint4{};
        }
    }
};

template <int CHUNKS>
struct Inputs {
    uint4 at[CHUNKS][2];

    __device__ __forceinline__ void load(const T* const (&from)[CHUNKS], int k, int end) {
        const int t = threadIdx.x % 4;
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; chunk++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int input = k + 32 * half + 8 * t;
                const bool wanted = from[chunk] != nullptr && input < end;
                at[chunk][half] = wanted ? *reinterpret_cast<const uint4*>(from[chunk] + input) : uint4{};
            }
        }
    }
};

template <int CHUNKS>
__device__ __forceinline__ void shrink(float (*partial)[STRIDE], const T* x, const T* a, const int* rows, int count,
                                       int num_inputs, int begin, int end) {
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE, g = lane / 4, t = lane % 4;
    const int k = begin + warp * CHUNK;
    const T* from_a = a + static_cast<i64>(g) * num_inputs;
    Weights weights[PREFETCHED];
#pragma unroll
    for (int step = 0; step < PREFETCHED; step++) weights[step].load(from_a, num_inputs, k + step * STEP, end);
    if (t == 0) {
#pragma unroll
        for (int step = PREFETCHED; step < STEPS; step++) {
            const int at = k + step * STEP;
            if (at >= end) break;
            asm volatile("prefetch.global.L2 [%0];" : : "l"(from_a + at));
            asm volatile("prefetch.global.L2 [%0];" : : "l"(from_a + 8 * static_cast<i64>(num_inputs) + at));
        }
    }
    const T* from_x[CHUNKS];
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        const int row = 8 * chunk + g;
        from_x[chunk] = row < count ? x + static_cast<i64>(rows[row]) * num_inputs : nullptr;
    }
    wait_for_previous_kernel();
    float sums[CHUNKS][4] = {};
#pragma unroll
    for (int first = 0; first < STEPS; first += GROUP) {
        Inputs<CHUNKS> inputs[GROUP];
#pragma unroll
        for (int n = 0; n < GROUP; n++) inputs[n].load(from_x, k + (first + n) * STEP, end);
#pragma unroll
        for (int n = 0; n < GROUP; n++) {
            Weights& own = weights[(first + n) % PREFETCHED];
#pragma unroll
            for (int half = 0; half < 2; half++) {
#pragma unroll
                for (int chunk = 0; chunk < CHUNKS; chunk++)
                    mma_16x8x32(sums[chunk], own.near[half], own.far[half], inputs[n].at[chunk][half]);
            }
            const int next = first + n + PREFETCHED;
            if (next < STEPS) own.load(from_a, num_inputs, k + next * STEP, end);
        }
    }
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
#pragma unroll
        for (int c = 0; c < 4; c++)
            partial[warp * TILE_ROWS + 8 * chunk + 2 * t + c % 2][g + 8 * (c / 2)] = sums[chunk][c];
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * WARP_SIZE, 8)
    lora_shrink_few(float* shrunk, const T* x, const T* a, const int* rows, const int* tiles, const int* ranks,
                    int num_rows, int num_inputs, int num_parts, int max_rank) {
    __shared__ float partial[WARPS * TILE_ROWS][STRIDE];
    start_next_kernel();
    // Tiles, ranks and adapters are older than the step: read before the previous kernel's end.
    const int slot = tiles[3 * blockIdx.y], first = tiles[3 * blockIdx.y + 1], count = tiles[3 * blockIdx.y + 2];
    const int output = blockIdx.x * RANKS, begin = blockIdx.z * SPLIT_INPUTS;
    const int end = min(begin + SPLIT_INPUTS, num_inputs), rank = ranks[slot];
    if (count <= 0 || output % max_rank >= rank) {
        wait_for_previous_kernel();  // else the next kernel would not wait for it
        return;
    }
    const int width = num_parts * max_rank;
    const T* weights = a + (static_cast<i64>(slot) * width + output) * num_inputs;
    if (count > 8)
        shrink<2>(partial, x, weights, rows + first, count, num_inputs, begin, end);
    else
        shrink<1>(partial, x, weights, rows + first, count, num_inputs, begin, end);
    __syncthreads();
    float* to = shrunk + (static_cast<i64>(blockIdx.z) * num_rows + first) * width + output;
    for (int task = threadIdx.x; task < count * RANKS; task += blockDim.x) {
        const int row = task / RANKS, r = task % RANKS;
        if (output % max_rank + r >= rank) continue;
        float sum = 0.0f;
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) sum += partial[warp * TILE_ROWS + row][r];
        to[static_cast<i64>(row) * width + r] = sum;
    }
}
