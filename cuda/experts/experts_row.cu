// experts_row: add_rms_norm of one row, router, experts and their weighted sum in one launch.
//
//   x, residual, norm [H], router [E, H], gate_up [E, 2 I, H], down [E, H, I], out [H]; slots int64 [1] or null:
//   outside 0..num_slots - 1 is padding, out 0; k <= 32, E <= 1024; aligned to 16 bytes, H a multiple of 16 up to 4096,
//   I of 8 scratch: logits float32 [E], gated_rows [k, I]; arrived, a word that is 0 before the first launch
//   grid (at most the SMs: all blocks must run at once), block (512), shared memory: rings of STAGES, row, gated_rows,
//   sums
//   reference: NumpyOps.add_norm_experts
//   roofline: 3 k H I elements: 75 MB for Qwen3-30B-A3B, 18 us on an H200
//
// Every block norms the row and finds the experts from all blocks' logits. Its warps then read their weights through
// rings, `down`'s right after `gate_up`'s, while blocks wait for each other's gated products.
#include "common/mma.cuh"
#include "common/product_types.cuh"
#include "experts/rank_of.cuh"
#include "layer/gated.cuh"

constexpr int WARPS = 16;
constexpr int THREADS = WARP_SIZE * WARPS;
constexpr int SIZE = Vec<T>::SIZE;
constexpr int SPAN = 128;       // columns of a stage
constexpr int TILE_ROWS = 16;   // weight rows of a stage
constexpr int GATED_ROWS = 8;   // gates of a tile of gate_up, then their ups
constexpr int VECS = SPAN / SIZE;
constexpr int STAGE_BYTES = TILE_ROWS * SPAN * sizeof(T);
constexpr int MAX_USED = 32;
constexpr int MAX_EXPERTS = 1024;
constexpr u32 MAX_POLLS = 1 << 26;  // half a minute: then the launch fails, and another worker takes the requests

__device__ __forceinline__ u32 load_acquire(const u32* from) {
    u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

// A barrier of all blocks. The first block's increment flips the highest bit in each round.
__device__ __forceinline__ void sync_grid(u32* arrived) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        const u32 old = atomicAdd(arrived, blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1u);
        for (u32 polls = 0; ((old ^ load_acquire(arrived)) & 0x80000000u) == 0; ++polls) {
            if (polls == MAX_POLLS) __trap();
        }
        __threadfence();
    }
    __syncthreads();
}

struct Sizes {
    int hidden, inner, num_used;
    int num_tiles;   // of gate_up, of an expert
    int num_items;   // tiles of gate_up, of all the row's experts
    int num_units;   // of a block: items, then tiles of down
    int gate_units;
    int gate_parts;  // stages of a warp in a unit
    int down_spans, down_parts;

    __device__ __forceinline__ Sizes(int hidden, int inner, int num_used) : hidden(hidden), inner(inner), num_used(num_used) {
        num_tiles = inner / GATED_ROWS;
        num_items = num_tiles * num_used;
        gate_units = (num_items + gridDim.x - 1) / gridDim.x;
        num_units = gate_units + (hidden / TILE_ROWS + gridDim.x - 1) / gridDim.x;
        gate_parts = (hidden + WARPS * SPAN - 1) / (WARPS * SPAN);
        down_spans = (inner + SPAN - 1) / SPAN;
        down_parts = (down_spans * num_used + WARPS - 1) / WARPS;
    }
};

struct Position {
    int unit, part;

    __device__ __forceinline__ void advance(const Sizes& sizes) {
        part++;
        if (part < (unit < sizes.gate_units ? sizes.gate_parts : sizes.down_parts)) return;
        part = 0;
        unit++;
    }
};

struct Weights {
    const T* gate_up;
    const T* down;
    const int* experts;  // of the row, in shared memory

    // Not inlined: the kernel runs once, and reads less code.
    __device__ __noinline__ void start_copies(u32 stage, Position at, const Sizes& sizes) const {
        const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE, vec = lane % VECS;
        const T* from = gate_up;  // of the stage's first row
        int width = sizes.hidden, jump = 0, column = 0;
        bool wanted = false;
        if (at.unit < sizes.gate_units) {
            const int item = blockIdx.x + at.unit * gridDim.x, span = at.part * WARPS + warp;
            wanted = item < sizes.num_items;
            column = span * SPAN + vec * SIZE;
            if (wanted) {
                const i64 first = experts[item / sizes.num_tiles] * 2ll * sizes.inner + item % sizes.num_tiles * GATED_ROWS;
                from = gate_up + first * width;
                jump = sizes.inner - GATED_ROWS;
            }
        } else if (at.unit < sizes.num_units) {
            const int tile = blockIdx.x + (at.unit - sizes.gate_units) * gridDim.x, both = at.part * WARPS + warp;
            const int pair = both / sizes.down_spans;
            width = sizes.inner;
            wanted = tile * TILE_ROWS < sizes.hidden && pair < sizes.num_used;
            column = both % sizes.down_spans * SPAN + vec * SIZE;
            if (wanted) from = down + (experts[pair] * static_cast<i64>(sizes.hidden) + tile * TILE_ROWS) * width;
        }
        wanted = wanted && column < width;
#pragma unroll
        for (int n = 0; n < TILE_ROWS * VECS / WARP_SIZE; n++) {
            const int row = lane / VECS + n * (WARP_SIZE / VECS);
            const T* own = from + static_cast<i64>(row + (row < GATED_ROWS ? 0 : jump)) * width + column;
            copy_async_16(stage + row_pair_offset<VECS>(row, vec), wanted ? own : gate_up, wanted);
        }
        commit_copies();
    }
};

// Rows g and g + 8 of a stage times 128 columns `by` in shared memory; complete in lanes with t = 0.
__device__ __forceinline__ void add_products(float (&sum)[4], const char* held, const T* by) {
    const int lane = threadIdx.x % WARP_SIZE, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int c = 0; c < SPAN / 32; c++) {
        const uint4 x = load_shared(by + c * 32 + t * SIZE);
        const uint4 low = load_shared(held + row_pair_offset<VECS>(g, c * 4 + t));
        const uint4 high = load_shared(held + row_pair_offset<VECS>(g + 8, c * 4 + t));
        mma_16x8x32(sum, low, high, x);
    }
}

// route_row by the whole block.
__device__ __forceinline__ void route(const float* logits, int* experts, float* weights, int num_experts, int num_used,
                                      int renormalise) {
    __shared__ u32 ranks[MAX_EXPERTS];
    __shared__ float values[MAX_USED];
    float own = 0.0f;
    for (int e = threadIdx.x; e < num_experts; e += THREADS) ranks[e] = rank_of(__ldcg(logits + e));
    __syncthreads();
    constexpr int HELPERS = 4;  // threads that count for one expert
    const int helper = threadIdx.x % HELPERS;
    for (int first = 0; first < num_experts; first += THREADS / HELPERS) {
        const int e = first + threadIdx.x / HELPERS;
        const u32 rank = e < num_experts ? ranks[e] : 0;
        int better = 0;
#pragma unroll 8
        for (int other = helper; other < num_experts; other += HELPERS)
            better += ranks[other] > rank || (ranks[other] == rank && other < e);
#pragma unroll
        for (int offset = 1; offset < HELPERS; offset *= 2) better += __shfl_xor_sync(FULL_WARP, better, offset);
        if (helper == 0 && e < num_experts && better < num_used) {
            experts[better] = e;
            values[better] = __ldcg(logits + e);
        }
    }
    __syncthreads();
    for (int e = threadIdx.x; e < num_experts; e += THREADS) own += expf(__ldcg(logits + e) - values[0]);
    const float total = block_sum(own);
    if (threadIdx.x == 0) {
        float sum = 0.0f;
        for (int j = 0; j < num_used; j++) sum += weights[j] = expf(values[j] - values[0]) / total;
        for (int j = 0; j < num_used && renormalise; j++) weights[j] /= sum;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    experts_row(const T* x, T* residual, const T* norm, const T* router, const T* gate_up, const T* down, const i64* slots,
                float* logits, T* gated_rows, T* out, u32* arrived, int hidden, int inner, int num_experts, int num_used,
                int renormalise, i64 num_slots, float eps) {
    extern __shared__ __align__(128) char shared[];
    __shared__ int experts[MAX_USED];
    __shared__ float weights[MAX_USED];
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE, g = lane / 4, t = lane % 4;
    const Sizes sizes(hidden, inner, num_used);
    const int padded_inner = sizes.down_spans * SPAN;
    char* ring = shared + warp * STAGES * STAGE_BYTES;
    T* normed = reinterpret_cast<T*>(shared + WARPS * STAGES * STAGE_BYTES);  // [hidden], in whole rounds of spans
    T* held_gated = normed + sizes.gate_parts * WARPS * SPAN;                 // [num_used][padded_inner]
    float* sums = reinterpret_cast<float*>(held_gated + num_used * padded_inner);  // of units x warps or pairs x spans
    const u32 ring_address = shared_address(ring);

    start_next_kernel();
    const int column = threadIdx.x * SIZE;
    const bool has_column = column < hidden;
    Vec<T> by = {}, own_router = {}, held = {};
    if (has_column) {
        by = load_vec(norm + column);
        if (blockIdx.x < num_experts) own_router = load_vec(router + static_cast<i64>(blockIdx.x) * hidden + column);
    }
    wait_for_previous_kernel();
    const bool is_padding = slots != nullptr && (*slots < 0 || *slots >= num_slots);
    float squares = 0.0f;
    if (has_column) {
        const Vec<T> more = load_vec(x + column);
        held = load_vec(residual + column);
#pragma unroll
        for (int i = 0; i < SIZE; i++) {
            held.at[i] = from_float<T>(to_float(held.at[i]) + to_float(more.at[i]));
            squares += to_float(held.at[i]) * to_float(held.at[i]);
        }
    }
    const float scale = 1.0f / sqrtf(block_sum(squares) / hidden + eps);
    Vec<T> made;
#pragma unroll
    for (int i = 0; i < SIZE; i++) made.at[i] = from_float<T>(to_float(held.at[i]) * scale * to_float(by.at[i]));
    if (column < sizes.gate_parts * WARPS * SPAN) store_vec(normed + column, made);
    for (int e = blockIdx.x; e < num_experts; e += gridDim.x) {
        if (e != blockIdx.x && has_column) own_router = load_vec(router + static_cast<i64>(e) * hidden + column);
        float product = 0.0f;
#pragma unroll
        for (int i = 0; i < SIZE; i++) product = fmaf(to_float(made.at[i]), to_float(own_router.at[i]), product);
        product = block_sum(product);
        if (threadIdx.x == 0) logits[e] = product;
    }
    sync_grid(arrived);

    if (blockIdx.x == 0 && has_column) store_vec(residual + column, held);  // all have read it
    if (is_padding) {
        for (int tile = blockIdx.x; tile < hidden / TILE_ROWS; tile += gridDim.x)
            if (threadIdx.x < TILE_ROWS) out[tile * TILE_ROWS + threadIdx.x] = from_float<T>(0.0f);
        return;
    }
    route(logits, experts, weights, num_experts, num_used, renormalise);
    const Weights all = {gate_up, down, experts};
    Position ahead = {0, 0};
#pragma unroll 1
    for (int stage = 0; stage < STAGES; stage++) {
        all.start_copies(ring_address + stage * STAGE_BYTES, ahead, sizes);
        ahead.advance(sizes);
    }

    int stage = 0;
    const auto next_stage = [&] {
        __syncwarp();  // all lanes have read the stage
        all.start_copies(ring_address + stage * STAGE_BYTES, ahead, sizes);
        ahead.advance(sizes);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    };
#pragma unroll 1
    for (int unit = 0; unit < sizes.gate_units; unit++) {
        float sum[4] = {};
#pragma unroll 1
        for (int part = 0; part < sizes.gate_parts; part++) {
            wait_for_copies<STAGES - 1>();
            __syncwarp();
            add_products(sum, ring + stage * STAGE_BYTES, normed + (part * WARPS + warp) * SPAN);
            next_stage();
        }
        if (t == 0) {
            sums[(unit * WARPS + warp) * TILE_ROWS + g] = sum[0];
            sums[(unit * WARPS + warp) * TILE_ROWS + g + 8] = sum[2];
        }
    }
    __syncthreads();
    for (int n = threadIdx.x; n < sizes.gate_units * GATED_ROWS; n += THREADS) {
        const int unit = n / GATED_ROWS, row = n % GATED_ROWS, item = blockIdx.x + unit * gridDim.x;
        float gate = 0.0f, up = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            gate += sums[(unit * WARPS + w) * TILE_ROWS + row];
            up += sums[(unit * WARPS + w) * TILE_ROWS + row + GATED_ROWS];
        }
        if (item < sizes.num_items)  // items of an expert are in the order of its rows
            gated_rows[item * GATED_ROWS + row] = gated(from_float<T>(gate), from_float<T>(up));
    }
    sync_grid(arrived);

    for (int n = threadIdx.x; n < num_used * padded_inner / SIZE; n += THREADS) {
        const int pair = n * SIZE / padded_inner, k = n * SIZE % padded_inner;
        const uint4* from = reinterpret_cast<const uint4*>(gated_rows + pair * inner + k);
        reinterpret_cast<uint4*>(held_gated)[n] = k < inner ? __ldcg(from) : uint4{};
    }
    __syncthreads();
    const int num_sums = sizes.down_parts * WARPS * TILE_ROWS;
#pragma unroll 1
    for (int unit = sizes.gate_units; unit < sizes.num_units; unit++) {
        float* own = sums + unit % 2 * num_sums;  // double-buffered
#pragma unroll 1
        for (int part = 0; part < sizes.down_parts; part++) {
            const int both = part * WARPS + warp;
            float sum[4] = {};
            wait_for_copies<STAGES - 1>();
            __syncwarp();
            if (both < num_used * sizes.down_spans) {
                add_products(sum, ring + stage * STAGE_BYTES, held_gated + both * SPAN);
                if (t == 0) {
                    own[both * TILE_ROWS + g] = sum[0];
                    own[both * TILE_ROWS + g + 8] = sum[2];
                }
            }
            next_stage();
        }
        __syncthreads();
        const int n = (blockIdx.x + (unit - sizes.gate_units) * gridDim.x) * TILE_ROWS + threadIdx.x;
        if (threadIdx.x < TILE_ROWS && n < hidden) {
            float total = 0.0f;
            for (int j = 0; j < num_used; j++) {
                float of_pair = 0.0f;
                for (int span = 0; span < sizes.down_spans; span++)
                    of_pair += own[(j * sizes.down_spans + span) * TILE_ROWS + threadIdx.x];
                total = fmaf(weights[j], to_float(from_float<T>(of_pair)), total);
            }
            out[n] = from_float<T>(total);
        }
    }
    wait_for_copies<0>();
}
