// small_m_fp8_sm90: out[m] = (x[m] @ weight.T) * x_scale[m] * weight_scale + bias on Hopper (sm_90a), both in e4m3, for
// up to 256 rows. Up to 128 the time is that of reading the weights once.
//
//   x e4m3 [M, K], x_scale float32 [M], weight e4m3 [N, K], weight_scale float32 [N], bias [N] or null, out [M, N];
//   M <= COLS. `weight_map` is weight as a 2-D tensor map of 16-bit elements (two of K each), with boxes of 64 x ROWS
//   rows, `x_map` is x with boxes of 64 x COLS rows; both with the 128-byte swizzle.
//   A build defines ROWS (weight rows of a tile, at most 128), COLS (rows of x: 16, 32, 64, 96, 128, 192, 256), STAGES,
//   AHEAD, SPLIT, SHARED_BYTES and OUT_FLOAT as for small_m_sm90.cu.
//   grid: up to one block a tile, with SPLIT 2 two; block THREADS
//   reference: NumpyOps.linear
//   needs: x, weight and out aligned to 16 bytes, K a multiple of 16
//   roofline: N K bytes moved; 0.9 of copy bandwidth from 100 MB of weights, up to M = 64
//
// As small_m_sm90, with 128 elements of K a stage. The order of an element's sums depends on K and SPLIT alone: a row
// of x gives the same bits in any batch.
#include "common/wgmma.cuh"

#if QUIRE_DTYPE == 0
#error "the transposing stores take float16 and bfloat16"
#endif
#if OUT_FLOAT
using Out = float;
#else
using Out = T;
#endif

constexpr int SPAN = 128;  // elements of K in a stage: rows of 128 bytes
constexpr int WARPGROUPS = (ROWS + 63) / 64;
constexpr int CONSUMERS = WARPGROUP_SIZE * WARPGROUPS;
constexpr int THREADS = CONSUMERS + WARP_SIZE;
constexpr int WEIGHT_BYTES = ROWS * SPAN;
constexpr int STAGE_BYTES = WEIGHT_BYTES + COLS * SPAN;
constexpr int CHUNKS = COLS / 8;  // of a warpgroup's sums: 8 rows of x, four sums a thread
constexpr int SENT_BYTES = SPLIT == 2 ? CONSUMERS * CHUNKS / 2 * 16 : 0;
constexpr int BARRIER_BYTES = 16 * STAGES + 8;
constexpr int SCALE_BYTES = COLS * 4;
// The last warpgroup reads 64 rows even of a shorter tile: past it lies x, and in the last stage this padding.
constexpr int ROWS_PAST = 64 * WARPGROUPS - ROWS - COLS;
constexpr int PAST_BYTES = ROWS_PAST > 0 ? ROWS_PAST * SPAN : 0;
static_assert(AHEAD <= STAGES, "AHEAD stages fit in the ring");
static_assert(ROWS % 8 == 0 && ROWS <= 128 && COLS % 16 == 0 && COLS <= 256, "whole eights of the swizzle");
static_assert(SHARED_BYTES == 1024 + STAGES * STAGE_BYTES + SENT_BYTES + BARRIER_BYTES + SCALE_BYTES + PAST_BYTES,
              "the launcher's memory is not this");

// Shared memory: STAGES of weights and x, the sums from the other block, then barriers: full and empty for each stage,
// and one for the sums sent; then the scales of x.
struct Shared {
    u32 base;

    __device__ __forceinline__ u32 weights(u32 iteration) const { return base + iteration % STAGES * STAGE_BYTES; }
    __device__ __forceinline__ u32 x(u32 iteration) const { return weights(iteration) + WEIGHT_BYTES; }
    __device__ __forceinline__ u32 sent() const { return base + STAGES * STAGE_BYTES; }
    __device__ __forceinline__ u32 barrier(int i) const { return sent() + SENT_BYTES + 8 * i; }
    __device__ __forceinline__ u32 full(u32 iteration) const { return barrier(iteration % STAGES); }
    __device__ __forceinline__ u32 empty(u32 iteration) const { return barrier(STAGES + iteration % STAGES); }
    __device__ __forceinline__ u32 all_sent() const { return barrier(2 * STAGES); }
    __device__ __forceinline__ u32 x_scales() const { return barrier(2 * STAGES + 1); }
    __device__ __forceinline__ u32 parity(u32 iteration) const { return iteration / STAGES % 2; }
};

// A block's share of the work: its split of K for one tile, then for the next. An iteration fills one stage.
struct BlockWork {
    int split, first_tile, num_tiles, first_span, num_spans;

    __device__ __forceinline__ BlockWork(int n_size, int k_size) {
        const int spans = (k_size + SPAN - 1) / SPAN, tiles = (n_size + ROWS - 1) / ROWS;
        const int step = gridDim.x / SPLIT;
        split = blockIdx.x % SPLIT;
        first_tile = blockIdx.x / SPLIT;
        num_tiles = (tiles - first_tile + step - 1) / step;
        first_span = spans * split / SPLIT;
        num_spans = spans * (split + 1) / SPLIT - first_span;
    }
    __device__ __forceinline__ u32 num_iterations() const { return num_tiles * num_spans; }
    // As the maps count: two elements of K.
    __device__ __forceinline__ int k(u32 iteration) const { return (first_span + iteration % num_spans) * (SPAN / 2); }
    __device__ __forceinline__ int first_row(int tile) const {
        return (first_tile + tile * (gridDim.x / SPLIT)) * ROWS;
    }
};

struct Producer {
    const Shared& shared;
    const BlockWork& work;
    const TensorMap& weight_map;
    const TensorMap& x_map;
    u64 policy;

    __device__ __forceinline__ void fetch_weights(u32 iteration) const {
        arrive_expecting(shared.full(iteration), STAGE_BYTES);
        const int row = work.first_row(iteration / work.num_spans);
        copy_box(shared.weights(iteration), weight_map, work.k(iteration), row, shared.full(iteration), policy);
    }
    __device__ __forceinline__ void fetch_x(u32 iteration) const {
        copy_box(shared.x(iteration), x_map, work.k(iteration), 0, shared.full(iteration));
    }
    __device__ __forceinline__ void fetch_ahead() const {
        for (u32 iteration = 0; iteration < min(static_cast<u32>(AHEAD), work.num_iterations()); ++iteration)
            fetch_weights(iteration);
    }
    __device__ __forceinline__ void fetch_all() const {
        for (u32 iteration = 0; iteration < work.num_iterations(); ++iteration) {
            if (iteration >= STAGES) wait_for(shared.empty(iteration), shared.parity(iteration) ^ 1);
            if (iteration >= AHEAD) fetch_weights(iteration);
            fetch_x(iteration);
        }
    }
};

// The consumers copy the scales of x to shared memory: from global memory every store would wait for its own.
__device__ __forceinline__ void keep_scales(const Shared& shared, const float* x_scale, int num_rows) {
    for (int m = threadIdx.x; m < COLS; m += CONSUMERS) {
        const float scale = m < num_rows ? x_scale[m] : 0.0f;
        asm volatile("st.shared.f32 [%0], %1;" : : "r"(shared.x_scales() + 4 * m), "f"(scale) : "memory");
    }
}

using Sums = float[COLS / 2];

// The sums of one tile over this block's split of K, which starts at `iteration`.
__device__ __forceinline__ void sum_tile(Sums& sum, const Shared& shared, const BlockWork& work, u32 iteration) {
    const bool arrives = threadIdx.x % WARP_SIZE == 0;
    const u32 offset = threadIdx.x / WARPGROUP_SIZE * 64 * SPAN;
#pragma unroll
    for (int i = 0; i < COLS / 2; ++i) sum[i] = 0.0f;
    for (int n = 0; n < work.num_spans; ++n, ++iteration) {
        wait_for(shared.full(iteration), shared.parity(iteration));
        begin_products();
#pragma unroll
        for (int k = 0; k < SPAN; k += 32) {
            const u64 weights = operand(shared.weights(iteration) + offset + k, 0);
            multiply_add_e4m3(sum, weights, operand(shared.x(iteration) + k, 0));
        }
        commit_products();
        wait_for_products<1>(sum);
        if (n > 0 && arrives) arrive(shared.empty(iteration - 1));
    }
    wait_for_products<0>(sum);
    if (work.num_spans > 0 && arrives) arrive(shared.empty(iteration - 1));
}

// A warp's part of the output tile, and the scales and bias of this thread's two weight rows.
struct OutputTile {
    Out* out;
    u32 x_scales;    // in shared memory
    int first, end;  // weight rows: the first of this warp's sixteen, and where its tile ends
    int num_rows, n_size;
    float scale[2], bias[2];

    __device__ __forceinline__ OutputTile(Out* out, u32 x_scales, const float* weight_scale, const T* add, int tile_row,
                                     int num_rows, int n_size)
        : out(out), x_scales(x_scales), end(min(tile_row + ROWS, n_size)), num_rows(num_rows), n_size(n_size) {
        first = tile_row + threadIdx.x / WARP_SIZE * 16;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int n = first + threadIdx.x % WARP_SIZE / 4 + 8 * half;
            scale[half] = n < end ? __ldg(weight_scale + n) : 0.0f;
            bias[half] = add != nullptr && n < end ? to_float(add[n]) : 0.0f;
        }
    }

    // Stores rows 8 chunk to 8 chunk + 7 of x.
    __device__ __forceinline__ void store(int chunk, const float (&four)[4]) const {
        const int t = threadIdx.x % 4;
        float by[2];
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"  // volatile: all scales at once do not fit in registers
                     : "=f"(by[0]), "=f"(by[1])
                     : "r"(x_scales + (8 * chunk + 2 * t) * 4));
        float low[2], high[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            low[half] = four[2 * half] * scale[half] * by[0] + bias[half];
            high[half] = four[2 * half + 1] * scale[half] * by[1] + bias[half];
        }
#if OUT_FLOAT
        const int m = 8 * chunk + 2 * t;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int n = first + threadIdx.x % WARP_SIZE / 4 + 8 * half;
            if (n >= end) continue;
            if (m < num_rows) out[static_cast<i64>(m) * n_size + n] = low[half];
            if (m + 1 < num_rows) out[static_cast<i64>(m + 1) * n_size + n] = high[half];
        }
#else
        store_pairs(8 * chunk, transpose_matrix(pack_pair(low[0], high[0])),
                    transpose_matrix(pack_pair(low[1], high[1])));
#endif
    }

    // Row g of these eight of x: lane t has elements 2t and 2t + 1 of the warp's sixteen, and 2t + 8 and 2t + 9.
    __device__ __forceinline__ void store_pairs(int row_of_x, u32 near, u32 far) const {
        const int lane = threadIdx.x % WARP_SIZE, g = lane / 4, t = lane % 4, m = row_of_x + g;
        Out* row = out + static_cast<i64>(m) * n_size + first;
        if (first + 16 <= end && n_size % 4 == 0) {  // lane t gets 4t to 4t + 3: the four write 32 bytes
            const int from = lane / 4 * 4 + t % 2 * 2;
            const u32 even[2] = {__shfl_sync(FULL_WARP, near, from), __shfl_sync(FULL_WARP, near, from + 1)};
            const u32 odd[2] = {__shfl_sync(FULL_WARP, far, from), __shfl_sync(FULL_WARP, far, from + 1)};
            const uint2 own = t < 2 ? make_uint2(even[0], even[1]) : make_uint2(odd[0], odd[1]);
            if (m < num_rows) *reinterpret_cast<uint2*>(row + 4 * t) = own;
            return;
        }
        if (m >= num_rows) return;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 pair = half == 0 ? near : far;
            const Out* two = reinterpret_cast<const Out*>(&pair);
            const int n = 8 * half + 2 * t;
            if (first + n < end) row[n] = two[0];
            if (first + n + 1 < end) row[n + 1] = two[1];
        }
    }
};

__device__ __forceinline__ void store_all(const Sums& sum, const OutputTile& output) {
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        const float four[4] = {sum[4 * chunk], sum[4 * chunk + 1], sum[4 * chunk + 2], sum[4 * chunk + 3]};
        output.store(chunk, four);
    }
}

// Sends one of every two chunks to the other block, and stores the other one.
__device__ __forceinline__ void store_half(const Sums& sum, const OutputTile& output, const Shared& shared, int split) {
    const u32 mine = shared.sent() + threadIdx.x * 16;
    const u32 theirs = address_in(1 - split, mine), barrier = address_in(1 - split, shared.all_sent());
    wait_for_cluster();  // the other block's barriers exist
#pragma unroll
    for (int pair = 0; pair < CHUNKS / 2; ++pair) {
        float four[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) four[i] = split == 0 ? sum[8 * pair + 4 + i] : sum[8 * pair + i];
        send(theirs + pair * CONSUMERS * 16, four, barrier);
    }
    wait_for_sent(shared.all_sent(), 0);
#pragma unroll
    for (int pair = 0; pair < CHUNKS / 2; ++pair) {
        float four[4];
        receive(four, mine + pair * CONSUMERS * 16);
#pragma unroll
        for (int i = 0; i < 4; ++i) four[i] += split == 0 ? sum[8 * pair + i] : sum[8 * pair + 4 + i];
        output.store(2 * pair + split, four);
    }
}

extern "C" __global__ void
#if SPLIT == 2
__cluster_dims__(2, 1, 1)
#endif
__launch_bounds__(THREADS, 1)
small_m_fp8_sm90(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap weight_map,
                  const float* x_scale, const float* weight_scale, const T* bias, Out* out, int num_rows, int n_size,
                  int k_size) {
    extern __shared__ unsigned char memory[];
    const Shared shared{(shared_address(memory) + 1023) / 1024 * 1024};
    const BlockWork work(n_size, k_size);
    const bool is_producer = threadIdx.x == CONSUMERS;
    const Producer producer{shared, work, weight_map, x_map, policy_of_read_once()};

    start_next_kernel();
    if (is_producer) {
        prefetch_map(weight_map);
        prefetch_map(x_map);
        for (int stage = 0; stage < STAGES; ++stage) {
            make_barrier(shared.full(stage), 1);
            make_barrier(shared.empty(stage), CONSUMERS / WARP_SIZE);
        }
        make_barrier(shared.all_sent(), 1);
        publish_barriers();
        if (SPLIT == 2) arrive_expecting(shared.all_sent(), SENT_BYTES);
        producer.fetch_ahead();
    }
    __syncthreads();
    if (SPLIT == 2) arrive_at_cluster();
    wait_for_previous_kernel();
    if (threadIdx.x >= CONSUMERS) {
        if (is_producer) producer.fetch_all();
        __syncwarp();
        if (SPLIT == 2) wait_for_cluster();
        return;
    }
    keep_scales(shared, x_scale, num_rows);
    for (int tile = 0; tile < work.num_tiles; ++tile) {
        const OutputTile output(out, shared.x_scales(), weight_scale, bias, work.first_row(tile), num_rows, n_size);
        Sums sum;
        sum_tile(sum, shared, work, tile * work.num_spans);
        if (tile == 0) sync_named_barrier(1, CONSUMERS);  // the scales are complete
        if (SPLIT == 2)
            store_half(sum, output, shared, work.split);
        else
            store_all(sum, output);
    }
}
