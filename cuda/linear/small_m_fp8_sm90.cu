// small_m_fp8_sm90: out[m] = (x[m] @ weight.T) * x_scale[m] * weight_scale + bias on Hopper (sm_90a), both in e4m3, for
// up to 256 rows: up to 128 the time is that of reading the weights once.
//
//   x e4m3 [M, K], x_scale float32 [M], weight e4m3 [N, K], weight_scale float32 [N], bias [N] or null, out [M, N];
//   M at most COLS. `weight_map` is weight as a 2-D tensor map of 16-bit elements, two of K each, with boxes of 64 of
//   them x ROWS rows, `x_map` is x with boxes of 64 x COLS rows; both with the 128-byte swizzle. What of a box lies
//   outside arrives as zeros.
//   A build defines ROWS (weight rows of a tile, at most 128), COLS (rows of x that it has room for: 16, 32, 64, 96,
//   128, 192, 256), STAGES (of the ring in shared memory), AHEAD (of them, whose weights do not wait for the previous
//   kernel), SPLIT (1, or 2: the two blocks of a cluster share out K of a tile), SHARED_BYTES, OUT_FLOAT: out has the
//   build's type (0) or float32 (1).
//   grid: up to a block a tile, or with SPLIT 2 two for each; block THREADS
//   reference: NumpyOps.linear_fp8
//   needs: x, weight and out aligned to 16 bytes, K a multiple of 16
//   roofline: N K bytes moved; 0.9 of copy bandwidth from 100 MB of weights on, up to M = 64
//
// As small_m_sm90: a tile of out, transposed, is ROWS weight rows times COLS rows of x, by wgmma; one more warp has
// both brought to shared memory, 128 elements of K a stage. The order in which an element is summed depends on K and
// SPLIT alone: a row of x gives the same bits whatever rows are beside it, in every build with this SPLIT.
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
// The last warpgroup reads 64 rows, also where a tile has fewer; what follows it is x, and in the last stage this.
constexpr int ROWS_PAST = 64 * WARPGROUPS - ROWS - COLS;
constexpr int PAST_BYTES = ROWS_PAST > 0 ? ROWS_PAST * SPAN : 0;
static_assert(AHEAD <= STAGES, "nothing is fetched to a stage that was not released");
static_assert(ROWS % 8 == 0 && ROWS <= 128 && COLS % 16 == 0 && COLS <= 256, "whole eights of the swizzle");
static_assert(SHARED_BYTES == 1024 + STAGES * STAGE_BYTES + SENT_BYTES + BARRIER_BYTES + SCALE_BYTES + PAST_BYTES,
              "the launcher's memory is not this");

// Shared memory: STAGES of weights and x, then what the other block sends, then barriers: for each stage one that says
// it is full and one that says it is empty, and one for what is sent; then the scales of x.
struct Shared {
    u32 base;

    __device__ __forceinline__ u32 weights(u32 turn) const { return base + turn % STAGES * STAGE_BYTES; }
    __device__ __forceinline__ u32 x(u32 turn) const { return weights(turn) + WEIGHT_BYTES; }
    __device__ __forceinline__ u32 sent() const { return base + STAGES * STAGE_BYTES; }
    __device__ __forceinline__ u32 barrier(int i) const { return sent() + SENT_BYTES + 8 * i; }
    __device__ __forceinline__ u32 full(u32 turn) const { return barrier(turn % STAGES); }
    __device__ __forceinline__ u32 empty(u32 turn) const { return barrier(STAGES + turn % STAGES); }
    __device__ __forceinline__ u32 all_sent() const { return barrier(2 * STAGES); }
    __device__ __forceinline__ u32 x_scales() const { return barrier(2 * STAGES + 1); }
    __device__ __forceinline__ u32 parity(u32 turn) const { return turn / STAGES % 2; }
};

// What a block works through: its part of K for one tile, then for the next. A turn is a stage of it.
struct Work {
    int part, first_tile, num_tiles, first_span, num_spans;

    __device__ __forceinline__ Work(int n_size, int k_size) {
        const int spans = (k_size + SPAN - 1) / SPAN, tiles = (n_size + ROWS - 1) / ROWS;
        const int step = gridDim.x / SPLIT;
        part = blockIdx.x % SPLIT;
        first_tile = blockIdx.x / SPLIT;
        num_tiles = (tiles - first_tile + step - 1) / step;
        first_span = spans * part / SPLIT;
        num_spans = spans * (part + 1) / SPLIT - first_span;
    }
    __device__ __forceinline__ u32 num_turns() const { return num_tiles * num_spans; }
    // As the maps count: two elements of K.
    __device__ __forceinline__ int k(u32 turn) const { return (first_span + turn % num_spans) * (SPAN / 2); }
    __device__ __forceinline__ int first_row(int tile) const {
        return (first_tile + tile * (gridDim.x / SPLIT)) * ROWS;
    }
};

struct Producer {
    const Shared& shared;
    const Work& work;
    const TensorMap& weight_map;
    const TensorMap& x_map;
    u64 policy;

    __device__ __forceinline__ void fetch_weights(u32 turn) const {
        arrive_expecting(shared.full(turn), STAGE_BYTES);
        const int row = work.first_row(turn / work.num_spans);
        copy_box(shared.weights(turn), weight_map, work.k(turn), row, shared.full(turn), policy);
    }
    __device__ __forceinline__ void fetch_x(u32 turn) const {
        copy_box(shared.x(turn), x_map, work.k(turn), 0, shared.full(turn));
    }
    __device__ __forceinline__ void begin() const {
        for (u32 turn = 0; turn < min(static_cast<u32>(AHEAD), work.num_turns()); ++turn) fetch_weights(turn);
    }
    __device__ __forceinline__ void go_on() const {
        for (u32 turn = 0; turn < work.num_turns(); ++turn) {
            if (turn >= STAGES) wait_for(shared.empty(turn), shared.parity(turn) ^ 1);
            if (turn >= AHEAD) fetch_weights(turn);
            fetch_x(turn);
        }
    }
};

// Has the consumers bring the scales of x to shared memory: read one by one while sums are stored, each would wait.
__device__ __forceinline__ void keep_scales(const Shared& shared, const float* x_scale, int num_rows) {
    for (int m = threadIdx.x; m < COLS; m += CONSUMERS) {
        const float scale = m < num_rows ? x_scale[m] : 0.0f;
        asm volatile("st.shared.f32 [%0], %1;" : : "r"(shared.x_scales() + 4 * m), "f"(scale) : "memory");
    }
}

using Sums = float[COLS / 2];

// The sums of one tile over this block's part of K; `turn` is its first.
__device__ __forceinline__ void add_up(Sums& sum, const Shared& shared, const Work& work, u32 turn) {
    const bool tells = threadIdx.x % WARP_SIZE == 0;
    const u32 offset = threadIdx.x / WARPGROUP_SIZE * 64 * SPAN;
#pragma unroll
    for (int i = 0; i < COLS / 2; ++i) sum[i] = 0.0f;
    for (int n = 0; n < work.num_spans; ++n, ++turn) {
        wait_for(shared.full(turn), shared.parity(turn));
        begin_products();
#pragma unroll
        for (int k = 0; k < SPAN; k += 32) {
            const u64 weights = operand(shared.weights(turn) + offset + k, 0);
            multiply_add_e4m3(sum, weights, operand(shared.x(turn) + k, 0));
        }
        commit_products();
        wait_for_products<1>(sum);
        if (n > 0 && tells) arrive(shared.empty(turn - 1));
    }
    wait_for_products<0>(sum);
    if (work.num_spans > 0 && tells) arrive(shared.empty(turn - 1));
}

// Where the sums of a warp go, with the scales and the bias of the two weight rows that a thread has of them.
struct Place {
    Out* out;
    u32 x_scales;    // in shared memory
    int first, end;  // weight rows: the first of this warp's sixteen, and where its tile ends
    int num_rows, n_size;
    float scale[2], bias[2];

    __device__ __forceinline__ Place(Out* out, u32 x_scales, const float* weight_scale, const T* add, int tile_row,
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

    // Sums of the rows of x from 8 chunk on.
    __device__ __forceinline__ void store(int chunk, const float (&four)[4]) const {
        const int t = threadIdx.x % 4;
        float by[2];
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"  // in its place: all of them at once do not fit in registers
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

__device__ __forceinline__ void store_all(const Sums& sum, const Place& place) {
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        const float four[4] = {sum[4 * chunk], sum[4 * chunk + 1], sum[4 * chunk + 2], sum[4 * chunk + 3]};
        place.store(chunk, four);
    }
}

// Of every two chunks this block sends one to the other block, and stores the other.
__device__ __forceinline__ void store_half(const Sums& sum, const Place& place, const Shared& shared, int part) {
    const u32 mine = shared.sent() + threadIdx.x * 16;
    const u32 theirs = address_in(1 - part, mine), barrier = address_in(1 - part, shared.all_sent());
    wait_for_cluster();  // the other block's barriers are there
#pragma unroll
    for (int pair = 0; pair < CHUNKS / 2; ++pair) {
        float four[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) four[i] = part == 0 ? sum[8 * pair + 4 + i] : sum[8 * pair + i];
        send(theirs + pair * CONSUMERS * 16, four, barrier);
    }
    wait_for_sent(shared.all_sent(), 0);
#pragma unroll
    for (int pair = 0; pair < CHUNKS / 2; ++pair) {
        float four[4];
        receive(four, mine + pair * CONSUMERS * 16);
#pragma unroll
        for (int i = 0; i < 4; ++i) four[i] += part == 0 ? sum[8 * pair + i] : sum[8 * pair + 4 + i];
        place.store(2 * pair + part, four);
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
    const Work work(n_size, k_size);
    const bool produces = threadIdx.x == CONSUMERS;
    const Producer producer{shared, work, weight_map, x_map, policy_of_read_once()};

    start_next_kernel();
    if (produces) {
        prefetch_map(weight_map);
        prefetch_map(x_map);
        for (int stage = 0; stage < STAGES; ++stage) {
            make_barrier(shared.full(stage), 1);
            make_barrier(shared.empty(stage), CONSUMERS / WARP_SIZE);
        }
        make_barrier(shared.all_sent(), 1);
        publish_barriers();
        if (SPLIT == 2) arrive_expecting(shared.all_sent(), SENT_BYTES);
        producer.begin();
    }
    __syncthreads();
    if (SPLIT == 2) arrive_at_cluster();
    wait_for_previous_kernel();
    if (threadIdx.x >= CONSUMERS) {
        if (produces) producer.go_on();
        __syncwarp();
        if (SPLIT == 2) wait_for_cluster();
        return;
    }
    keep_scales(shared, x_scale, num_rows);
    for (int tile = 0; tile < work.num_tiles; ++tile) {
        const Place place(out, shared.x_scales(), weight_scale, bias, work.first_row(tile), num_rows, n_size);
        Sums sum;
        add_up(sum, shared, work, tile * work.num_spans);
        if (tile == 0) meet(1, CONSUMERS);  // all of the scales are there
        if (SPLIT == 2)
            store_half(sum, place, shared, work.part);
        else
            store_all(sum, place);
    }
}
