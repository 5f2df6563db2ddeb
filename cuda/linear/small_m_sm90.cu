// small_m_sm90: out[m] = x[m] @ weight.T + bias on Hopper (sm_90a), for more rows than gemv takes; bound by reading the
// weights once.
//
//   x [M, K], weight [N, K], bias [N] or null, out [M, N]; M <= COLS. `weight_map` is weight as a 2-D tensor map with
//   boxes of 64 elements x ROWS rows, `x_map` is x with boxes of 64 elements x COLS rows; both with the 128-byte
//   swizzle.
//   A build defines ROWS (weight rows of a tile, at most 128), COLS (rows of x: 32, 64, 96, 128), STAGES (of the ring
//   in shared memory), AHEAD (stages whose weights do not wait for the previous kernel), SPLIT (1, or 2: two blocks
//   split K of a tile), SHARED_BYTES, OUT_FLOAT: out has the build's type (0) or float32 (1).
//   grid: up to one block a tile, with SPLIT 2 two; block THREADS
//   reference: NumpyOps.linear
//   needs: x, weight and out aligned to 16 bytes, K a multiple of 8, 16-bit elements
//   roofline: N K elements moved; 0.9 of copy bandwidth from 100 MB of weights
//
// A tile of out, transposed, is ROWS weight rows times COLS rows of x, by wgmma: 64 weight rows a warpgroup. Another
// warp fetches both, 64 elements of K a stage. Only AHEAD stages of weights are fetched early, since x would wait for
// more. With SPLIT 2 each block sends half of its sums to the other, in a fixed order: results are deterministic.
#include "common/wgmma.cuh"

#if QUIRE_DTYPE == 0
#error "the tensor cores take float16 and bfloat16"
#endif
#if OUT_FLOAT
using Out = float;
#else
using Out = T;
#endif

constexpr int SPAN = 64;  // elements of K in a stage: rows of 128 bytes
constexpr int WARPGROUPS = (ROWS + 63) / 64;
constexpr int CONSUMERS = WARPGROUP_SIZE * WARPGROUPS;
constexpr int THREADS = CONSUMERS + WARP_SIZE;
constexpr int WEIGHT_BYTES = ROWS * 128;
constexpr int STAGE_BYTES = WEIGHT_BYTES + COLS * 128;
constexpr int CHUNKS = COLS / 8;  // of a warpgroup's sums: 8 rows of x, four sums a thread
constexpr int SENT_BYTES = SPLIT == 2 ? CONSUMERS * CHUNKS / 2 * 16 : 0;
constexpr int BARRIER_BYTES = 16 * STAGES + 8;
// The last warpgroup reads 64 rows even of a shorter tile: past it lies x, and in the last stage this padding.
constexpr int ROWS_PAST = 64 * WARPGROUPS - ROWS - COLS;
constexpr int PAST_BYTES = ROWS_PAST > 0 ? ROWS_PAST * 128 : 0;
static_assert(AHEAD <= STAGES, "AHEAD stages fit in the ring");
static_assert(ROWS % 8 == 0 && ROWS <= 128 && COLS % 32 == 0 && COLS <= 128, "whole eights of the swizzle");
static_assert(SHARED_BYTES == 1024 + STAGES * STAGE_BYTES + SENT_BYTES + BARRIER_BYTES + PAST_BYTES,
              "the launcher's memory is not this");

// Shared memory: STAGES of weights and x, the sums from the other block, then barriers: full and empty for each stage,
// and one for the sums sent.
struct Shared {
    u32 base;

    __device__ __forceinline__ u32 weights(u32 iteration) const { return base + iteration % STAGES * STAGE_BYTES; }
    __device__ __forceinline__ u32 x(u32 iteration) const { return weights(iteration) + WEIGHT_BYTES; }
    __device__ __forceinline__ u32 sent() const { return base + STAGES * STAGE_BYTES; }
    __device__ __forceinline__ u32 barrier(int i) const { return sent() + SENT_BYTES + 8 * i; }
    __device__ __forceinline__ u32 full(u32 iteration) const { return barrier(iteration % STAGES); }
    __device__ __forceinline__ u32 empty(u32 iteration) const { return barrier(STAGES + iteration % STAGES); }
    __device__ __forceinline__ u32 all_sent() const { return barrier(2 * STAGES); }
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
    __device__ __forceinline__ int k(u32 iteration) const { return (first_span + iteration % num_spans) * SPAN; }
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

using Sums = float[COLS / 2];

// The sums of one tile over this block's split of K, which starts at `iteration`.
__device__ __forceinline__ void sum_tile(Sums& sum, const Shared& shared, const BlockWork& work, u32 iteration) {
    const bool arrives = threadIdx.x % WARP_SIZE == 0;
    const u32 offset = threadIdx.x / WARPGROUP_SIZE * 64 * 128;
#pragma unroll
    for (int i = 0; i < COLS / 2; ++i) sum[i] = 0.0f;
    for (int n = 0; n < work.num_spans; ++n, ++iteration) {
        wait_for(shared.full(iteration), shared.parity(iteration));
        begin_products();
#pragma unroll
        for (int k = 0; k < SPAN / 16; ++k) {
            const u64 weights = operand(shared.weights(iteration) + offset + k * 32, 0);
            multiply_add(sum, weights, operand(shared.x(iteration) + k * 32, 0));
        }
        commit_products();
        wait_for_products<1>(sum);
        if (n > 0 && arrives) arrive(shared.empty(iteration - 1));
    }
    wait_for_products<0>(sum);
    if (work.num_spans > 0 && arrives) arrive(shared.empty(iteration - 1));
}

// A warp's part of the output tile, and the bias of this thread's two weight rows.
struct OutputTile {
    Out* out;
    int first, end;  // weight rows: the first of this warp's sixteen, and where its tile ends
    int num_rows, n_size;
    float bias[2];

    __device__ __forceinline__ OutputTile(Out* out, const T* add, int tile_row, int num_rows, int n_size)
        : out(out), end(min(tile_row + ROWS, n_size)), num_rows(num_rows), n_size(n_size) {
        first = tile_row + threadIdx.x / WARP_SIZE * 16;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = first + 8 * half + threadIdx.x % WARP_SIZE / 4;
            bias[half] = add != nullptr && row < end ? to_float(add[row]) : 0.0f;
        }
    }

    // Stores rows 8 chunk to 8 chunk + 7 of x. 16-bit results are transposed first, so that a lane stores adjacent
    // ones.
    __device__ __forceinline__ void store(int chunk, const float (&four)[4]) const {
        const int g = threadIdx.x % WARP_SIZE / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float low = four[2 * half] + bias[half], high = four[2 * half + 1] + bias[half];
            const int row = first + 8 * half;
#if OUT_FLOAT
            const int m = 8 * chunk + 2 * t, n = row + g;
            if (n >= end) continue;
            if (m < num_rows) out[static_cast<i64>(m) * n_size + n] = low;
            if (m + 1 < num_rows) out[static_cast<i64>(m + 1) * n_size + n] = high;
#else
            const u32 pair = transpose_matrix(pack_pair(low, high));
            const int m = 8 * chunk + g, n = row + 2 * t;
            if (m >= num_rows || n >= end) continue;
            T* to = out + static_cast<i64>(m) * n_size + n;
            if (n_size % 2 == 0) {
                *reinterpret_cast<u32*>(to) = pair;
            } else {
                const T* two = reinterpret_cast<const T*>(&pair);
                to[0] = two[0];
                if (n + 1 < end) to[1] = two[1];
            }
#endif
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
small_m_sm90(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap weight_map, const T* bias,
              Out* out, int num_rows, int n_size, int k_size) {
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
    for (int tile = 0; tile < work.num_tiles; ++tile) {
        Sums sum;
        sum_tile(sum, shared, work, tile * work.num_spans);
        const OutputTile output(out, bias, work.first_row(tile), num_rows, n_size);
        if (SPLIT == 2)
            store_half(sum, output, shared, work.split);
        else
            store_all(sum, output);
    }
}
