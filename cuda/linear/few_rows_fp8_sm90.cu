// few_rows_fp8_sm90: small_m_fp8_sm90 for a few rows, with its bits. x stays in shared memory, so the ring holds only
// weights and keeps filling while the previous kernel runs.
//
//   arrays as in small_m_fp8_sm90; COLS 16; X_ROWS (1, 2, 4, 8) >= M; X_BYTES: X_ROWS rows of a block's split of K, in
//   whole spans; WINDOW: most stages in flight
//   GATED: N = 2 I, I a multiple of 8, SPLIT 1, ROWS a multiple of 16, half gate and half up; weight_map has dimensions
//   K, 8, gate and up, I / 8; out is silu_mul's T [M, I], maxima u32 [M, gridDim.x] its largest magnitudes
//   (common/fp8.cuh) per block
//   ROUNDS_X: x is `out` of GATED, x_scale its maxima, num_parts per row; a block's split of K is at most HELD chunks
//   per thread
//   grid: at most SPLIT blocks per tile; block THREADS
//   reference: NumpyOps.gated_mlp, with GATED for gate_up and ROUNDS_X for down; NumpyOps.linear
//   roofline: N K bytes; 0.9 of copy bandwidth from 100 MB
#define WEIGHT_ELEMENTS 128
#define X_BOXES 0
#define SCALE_BYTES (COLS * 4 + 8 + X_BYTES + 128)
#include "linear/small_m.cuh"
#include "linear/scaled_output.cuh"
#include "common/fp8.cuh"
#include "layer/gated.cuh"

#ifndef ROUNDS_X
#define ROUNDS_X 0
#endif
#ifndef GATED
#define GATED 0
#endif
#if ROUNDS_X
using X = T;
#else
using X = u8;
#endif

constexpr int CHUNK = 16;  // bytes
constexpr int HELD = 4;    // chunks of x that a thread loads at once
static_assert(COLS == 16 && X_ROWS <= 8, "rows of x of a core matrix");

// Chunk c of row r is chunk X_ROWS c + r; missing rows read the 128 bytes past the last.
__device__ __forceinline__ u32 x_address(const Shared& shared) { return shared.x_scales() + COLS * 4 + 8; }

__device__ __forceinline__ void store_chunk(const Shared& shared, int row, int chunk, uint4 value) {
    const u32 to = x_address(shared) + (chunk * X_ROWS + row) * CHUNK;
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(to), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
                 : "memory");
}

__device__ __forceinline__ void store_scale(const Shared& shared, int row, float scale) {
    asm volatile("st.shared.f32 [%0], %1;" : : "r"(shared.x_scales() + 4 * row), "f"(scale) : "memory");
}

#if ROUNDS_X

// Maximum over the consumers.
__device__ __forceinline__ u32 consumers_max(u32 value) {
    __shared__ u32 of_warps[CONSUMERS / WARP_SIZE];
    value = warp_max(value);
    sync_named_barrier(1, CONSUMERS);
    if (threadIdx.x % WARP_SIZE == 0) of_warps[threadIdx.x / WARP_SIZE] = value;
    sync_named_barrier(1, CONSUMERS);
#pragma unroll
    for (int n = 0; n < CONSUMERS / WARP_SIZE; ++n) value = max(value, of_warps[n]);
    return value;
}

// Quantises this block's part of the rows, each by the largest of its `num_parts` maxima.
__device__ __forceinline__ void keep_x(const Shared& shared, const BlockWork& work, const T* x, const void* maxima,
                                       int num_rows, int k_size, int num_parts) {
    constexpr int SPAN_CHUNKS = SPAN / CHUNK, SIZE = Vec<T>::SIZE, VECS = CHUNK / SIZE;
    const int first = work.first_span * SPAN_CHUNKS, chunks = work.num_spans * SPAN_CHUNKS;
    for (int row = 0; row < num_rows; ++row) {
        Vec<T> held[HELD][VECS];
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            const int chunk = threadIdx.x + i * CONSUMERS, k = (first + chunk) * CHUNK;
            if (chunk >= chunks || k >= k_size) break;
#pragma unroll
            for (int v = 0; v < VECS; ++v)
                held[i][v] = load_vec(x + static_cast<i64>(row) * k_size + k + v * SIZE);
        }
        u32 largest = 0;
        for (int i = threadIdx.x; i < num_parts; i += CONSUMERS)
            largest = max(largest, static_cast<const u32*>(maxima)[row * num_parts + i]);
        const float by = scale_of(consumers_max(largest)), inverse = 1.0f / by;
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            const int chunk = threadIdx.x + i * CONSUMERS;
            if (chunk >= chunks) break;
            u32 words[4] = {};
            if ((first + chunk) * CHUNK < k_size) {
#pragma unroll
                for (int n = 0; n < CHUNK; n += 4) {
                    const auto at = [&](int m) { return to_float(held[i][(n + m) / SIZE].at[(n + m) % SIZE]) * inverse; };
                    words[n / 4] = e4m3_pair(at(0), at(1)) | static_cast<u32>(e4m3_pair(at(2), at(3))) << 16;
                }
            }
            store_chunk(shared, row, chunk, uint4{words[0], words[1], words[2], words[3]});
        }
        if (threadIdx.x == 0) store_scale(shared, row, by);
    }
}

#else

__device__ __forceinline__ void keep_x(const Shared& shared, const BlockWork& work, const u8* x, const void* x_scale,
                                       int num_rows, int k_size, int) {
    constexpr int SPAN_CHUNKS = SPAN / CHUNK;
    const int chunks = work.num_spans * SPAN_CHUNKS, all = chunks * num_rows;
    if (threadIdx.x < num_rows) store_scale(shared, threadIdx.x, static_cast<const float*>(x_scale)[threadIdx.x]);
    for (int first = threadIdx.x; first < all; first += HELD * CONSUMERS) {
        uint4 held[HELD];
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            const int at = first + i * CONSUMERS, row = X_ROWS == 1 ? 0 : at / chunks;
            const int k = (work.first_span * SPAN_CHUNKS + at - row * chunks) * CHUNK;
            held[i] = uint4{};
            if (at < all && k < k_size)
                held[i] = *reinterpret_cast<const uint4*>(x + static_cast<i64>(row) * k_size + k);
        }
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            const int at = first + i * CONSUMERS, row = X_ROWS == 1 ? 0 : at / chunks;
            if (at < all) store_chunk(shared, row, at - row * chunks, held[i]);
        }
    }
}

#endif

// wgmma descriptor of unswizzled core matrices (8 rows of 16 bytes): the next along K begins X_ROWS rows later.
__device__ __forceinline__ u64 x_operand(u32 address) {
    return (static_cast<u64>(X_ROWS) << 32) | (static_cast<u64>(X_ROWS) << 16) | ((address & 0x3ffff) >> 4);
}

__device__ __forceinline__ void sum_tile(Sums& sum, const Shared& shared, const BlockWork& work, u32 iteration) {
    const bool arrives = threadIdx.x % WARP_SIZE == 0;
    const u32 offset = threadIdx.x / WARPGROUP_SIZE * 64 * 128;
    u32 x = x_address(shared);
    clear(sum);
    for (int n = 0; n < work.num_spans; ++n, ++iteration, x += SPAN * X_ROWS) {
        wait_for(shared.full(iteration), shared.parity(iteration));
        const u32 weights = shared.weights(iteration) + offset;
        begin_products();
#pragma unroll
        for (int k = 0; k < SPAN; k += 32) multiply_add_e4m3(sum, operand(weights + k, 0), x_operand(x + k * X_ROWS));
        commit_products();
        wait_for_products<1>(sum);
        if (n > 0 && arrives) arrive(shared.empty(iteration - 1));
    }
    wait_for_products<0>(sum);
    if (work.num_spans > 0 && arrives) arrive(shared.empty(iteration - 1));
}

#if GATED

// Gate and up of a column are rows g and g + 8 of a warp's 16.
struct GatedTile {
    T* out;
    u32 x_scales;
    int n, num_rows, width;
    bool is_inside;
    float scale[2], bias[2];

    __device__ __forceinline__ GatedTile(T* out, u32 x_scales, const float* weight_scale, const T* add, int tile_row,
                                         int num_rows, int n_size)
        : out(out), x_scales(x_scales), num_rows(num_rows), width(n_size / 2) {
        const int warp = threadIdx.x / WARP_SIZE;
        n = tile_row / 2 + warp * 8 + threadIdx.x % WARP_SIZE / 4;
        is_inside = warp * 16 < ROWS && n < width;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            scale[half] = is_inside ? __ldg(weight_scale + half * width + n) : 0.0f;
            bias[half] = add != nullptr && is_inside ? to_float(add[half * width + n]) : 0.0f;
        }
    }

    // Stores rows 0 .. 7 of x. `largest`: this thread's largest magnitudes in rows 2t and 2t + 1.
    __device__ __forceinline__ void store(const Sums& sum, u32 (&largest)[2]) const {
        const int t = threadIdx.x % 4;
        float by[2];
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(by[0]), "=f"(by[1]) : "r"(x_scales + 8 * t));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const T gate = from_float<T>(sum[i] * scale[0] * by[i] + bias[0]);
            const T up = from_float<T>(sum[2 + i] * scale[1] * by[i] + bias[1]);
            if (!is_inside || 2 * t + i >= num_rows) continue;
            const T product = gated(gate, up);
            out[static_cast<i64>(2 * t + i) * width + n] = product;
            largest[i] = max(largest[i], magnitude(to_float(product)));
        }
    }
};

__device__ __forceinline__ void store_maxima(const u32 (&largest)[2], u32* maxima, int num_rows) {
    __shared__ u32 of_warps[CONSUMERS / WARP_SIZE][8];
    const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        u32 value = largest[i];
#pragma unroll
        for (int offset = 4; offset < WARP_SIZE; offset *= 2)
            value = max(value, __shfl_xor_sync(FULL_WARP, value, offset));
        if (lane < 4) of_warps[threadIdx.x / WARP_SIZE][2 * lane + i] = value;
    }
    sync_named_barrier(1, CONSUMERS);
    if (threadIdx.x >= num_rows) return;
    u32 value = 0;
#pragma unroll
    for (int w = 0; w < CONSUMERS / WARP_SIZE; ++w) value = max(value, of_warps[w][threadIdx.x]);
    maxima[threadIdx.x * gridDim.x + blockIdx.x] = value;
}

#endif

// Loads of other kernels wait behind stages in flight: at most WINDOW.
__device__ __forceinline__ void fetch(const Producer& producer, u32 first, u32 end) {
    const Shared& shared = producer.shared;
#pragma unroll 1
    for (u32 i = first; i < end; ++i) {
        if (i >= STAGES) wait_for(shared.empty(i), shared.parity(i) ^ 1);
        if (i >= WINDOW) wait_for(shared.full(i - WINDOW), shared.parity(i - WINDOW));
#if GATED
        arrive_expecting(shared.full(i), STAGE_BYTES);
        const int row = producer.work.first_row(i / producer.work.num_spans);
        copy_box(shared.weights(i), producer.weight_map, producer.work.span(i) * BOX_ELEMENTS, 0, 0, row / 16,
                 shared.full(i), producer.policy);
#else
        producer.fetch_weights(i);
#endif
    }
}

extern "C" __global__ void SMALL_M_CLUSTER __launch_bounds__(THREADS, 1)
    few_rows_fp8_sm90(const __grid_constant__ TensorMap weight_map, const X* x, const void* x_scale,
                      const float* weight_scale, const T* bias, Out* out, u32* maxima, int num_rows, int n_size,
                      int k_size, int num_parts) {
    extern __shared__ unsigned char memory[];
    const Shared shared{(shared_address(memory) + 1023) / 1024 * 1024};
    const BlockWork work(n_size, k_size);
    start_next_kernel();
    const Producer producer{shared, work, weight_map, weight_map, policy_of_read_once()};
    const u32 num_iterations = work.num_iterations(), num_early = min(static_cast<u32>(WINDOW), num_iterations);
    const bool is_fetching = __shfl_sync(FULL_WARP, threadIdx.x / WARP_SIZE, 0) == CONSUMERS / WARP_SIZE;
    if (is_fetching && is_elected()) {
        prefetch_map(weight_map);
        make_ring_barriers(shared, CONSUMERS / WARP_SIZE);
        make_barrier(shared.all_sent(), 1);
        publish_barriers();
        if (SPLIT == 2) arrive_expecting(shared.all_sent(), SENT_BYTES);
        fetch(producer, 0, num_early);
    }
    __syncthreads();
    if (SPLIT == 2) arrive_at_cluster();
    if (is_fetching) {
        if (is_elected()) fetch(producer, num_early, num_iterations);  // weights, which no kernel writes
        __syncwarp();
        if (SPLIT == 2) wait_for_cluster();
        return;
    }
#if GATED
    using OutputTile = GatedTile;
    u32 largest[2] = {};
#endif
    const auto output_of = [&](int tile) {
        return OutputTile(out, shared.x_scales(), weight_scale, bias, work.first_row(tile), num_rows, n_size);
    };
    OutputTile output = output_of(0);
    wait_for_previous_kernel();
    keep_x(shared, work, x, x_scale, num_rows, k_size, num_parts);
    publish_stores();
    sync_named_barrier(1, CONSUMERS);
    for (int tile = 0; tile < work.num_tiles; ++tile) {
        if (tile > 0) output = output_of(tile);
        Sums sum;
        sum_tile(sum, shared, work, tile * work.num_spans);
#if GATED
        output.store(sum, largest);
#else
        store(sum, output, shared, work.split);
#endif
    }
#if GATED
    store_maxima(largest, maxima, num_rows);
#endif
}
