// The kernels of one row through a layer of experts: with WHOLE_LAYER from attention's output product to the next
// layer's first product, else add_rms_norm, router, experts and their weighted sum.
//
// A build defines WHOLE_LAYER, STAGES (of a warp's ring), with WHOLE_LAYER also HOLD (stages of the next product, kept
// apart from the ring), ATTENDED (a multiple of 8) and NEXT_SIZE; HIDDEN (of 16, up to 4096), INNER (of 8), NUM_EXPERTS
// (up to 1024), NUM_USED (up to 32), BLOCKS. Sizes of the build: less code is read, and none divides.
//
// Blocks exchange rows in words (row_words.cuh), and fetch the weights whose rows are known while they wait.
#pragma once

#include "common/mma.cuh"
#include "common/product_types.cuh"
#include "experts/rank_of.cuh"
#include "experts/row_words.cuh"
#include "layer/gated.cuh"

#if !WHOLE_LAYER
#define HOLD 0
#define ATTENDED 0
#define NEXT_SIZE 0
#endif

constexpr int WARPS = 16;
constexpr int THREADS = WARP_SIZE * WARPS;
constexpr int SIZE = Vec<T>::SIZE;
constexpr int SPAN = 128;      // columns of a stage
constexpr int TILE_ROWS = 16;  // weight rows of a stage
constexpr int GATED_ROWS = 8;  // gates of a tile of gate_up, then their ups
constexpr int VECS = SPAN / SIZE;
constexpr int STAGE_BYTES = TILE_ROWS * SPAN * sizeof(T);

constexpr int rounds(int count, int of) { return (count + of - 1) / of; }
constexpr int larger(int a, int b) { return a > b ? a : b; }

constexpr int NUM_TILES = INNER / GATED_ROWS;                  // of gate_up, of an expert
constexpr int NUM_ITEMS = NUM_TILES * NUM_USED;                // tiles of gate_up, of all the row's experts
constexpr int ROW_UNITS = rounds(HIDDEN / TILE_ROWS, BLOCKS);  // of a block: tiles of output and of down
constexpr int GATE_UNITS = rounds(NUM_ITEMS, BLOCKS);
constexpr int NEXT_UNITS = rounds(rounds(NEXT_SIZE, TILE_ROWS), BLOCKS);
constexpr int OUTPUT_PARTS = rounds(ATTENDED, WARPS * SPAN);  // stages of a warp in a unit
constexpr int ROW_PARTS = rounds(HIDDEN, WARPS * SPAN);
constexpr int DOWN_SPANS = rounds(INNER, SPAN);
constexpr int DOWN_PARTS = rounds(DOWN_SPANS * NUM_USED, WARPS);
constexpr int OUTPUT_STAGES = ROW_UNITS * OUTPUT_PARTS;
constexpr int NUM_LOGITS = larger(NUM_EXPERTS, BLOCKS);  // one of each block at least
constexpr int LOGIT_WORDS = rounds(NUM_LOGITS, 2) * 2;   // keeps the next words aligned

constexpr int PADDED_INNER = DOWN_SPANS * SPAN;
constexpr int ROW_ELEMENTS = ROW_PARTS * WARPS * SPAN;
constexpr int X_ELEMENTS = OUTPUT_PARTS * WARPS * SPAN;
constexpr int INPUT_BYTES = larger(larger(NUM_USED * PADDED_INNER, X_ELEMENTS) * 2, rounds(NUM_EXPERTS, 4) * 16);

struct Operands {
    const T* x;
    const T* output;
    const T* output_bias;
    T* residual;
    const T* norm;
    const T* router;
    const T* gate_up;
    const T* down;
    const i64* slots;
    const T* next_norm;
    const T* next;  // null: the norm is the result
    const T* next_bias;
    T* out;
    u64* words;
    u32* launches;
    int renormalise;
    i64 num_slots;
    float eps;
};

// The order in which a warp reads stages, from the first whose expert is known.
struct Position {
    enum { GATE, DOWN, NEXT, NONE };
    int kind, unit, part;

    __device__ __forceinline__ void advance() {
        if (kind == NONE) return;
        part++;
        if (part < (kind == DOWN ? DOWN_PARTS : ROW_PARTS)) return;
        part = 0;
        unit++;
        if (unit < (kind == GATE ? GATE_UNITS : kind == DOWN ? ROW_UNITS : NEXT_UNITS)) return;
        unit = 0;
        kind++;
        if (kind == NEXT) skip_held();
    }

    __device__ __forceinline__ void skip_held() {
        kind = HOLD / ROW_PARTS < NEXT_UNITS ? NEXT : NONE;
        unit = HOLD / ROW_PARTS;
        part = HOLD % ROW_PARTS;
    }
};

// Rows g and g + 8 of a stage times 128 columns `by` in shared memory; complete in lanes with t = 0.
__device__ __forceinline__ void add_products(float (&sum)[4], const char* stage, const T* by) {
    const int lane = threadIdx.x % WARP_SIZE, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int c = 0; c < SPAN / 32; c++) {
        const uint4 x = load_shared(by + c * 32 + t * SIZE);
        const uint4 low = load_shared(stage + row_pair_offset<VECS>(g, c * 4 + t));
        const uint4 high = load_shared(stage + row_pair_offset<VECS>(g + 8, c * 4 + t));
        mma_16x8x32(sum, low, high, x);
    }
}

// Starts to copy `num_rows` rows of `width` elements from `from` on, the last 8 of 16 `jump` rows further, 128 columns
// from `column`. Not inlined: the kernel runs once, and reads less code.
__device__ __noinline__ void copy_stage(u32 stage, const T* from, int width, int jump, int column, int num_rows) {
    const int lane = threadIdx.x % WARP_SIZE, vec = lane % VECS;
    column += vec * SIZE;
#pragma unroll
    for (int n = 0; n < TILE_ROWS * VECS / WARP_SIZE; n++) {
        const int row = lane / VECS + n * (WARP_SIZE / VECS);
        const bool wanted = column < width && row < num_rows;
        const T* own = from + static_cast<i64>(row + (row < GATED_ROWS ? 0 : jump)) * width + column;
        copy_async_16(stage + row_pair_offset<VECS>(row, vec), wanted ? own : from, wanted);
    }
}

// Experts of the best logits, best first, ties by lower id. Called by the whole block.
__device__ __forceinline__ void pick(const u32* ranks, int* experts) {
    constexpr int HELPERS = 4;  // threads that count for one expert
    const int helper = threadIdx.x % HELPERS;
#pragma unroll 1
    for (int first = 0; first < NUM_EXPERTS; first += THREADS / HELPERS) {
        const int e = first + threadIdx.x / HELPERS;
        const u32 rank = e < NUM_EXPERTS ? ranks[e] : 0;
        int better = 0;
#pragma unroll 8
        for (int other = helper; other < NUM_EXPERTS; other += HELPERS)
            better += ranks[other] > rank || (ranks[other] == rank && other < e);
#pragma unroll
        for (int offset = 1; offset < HELPERS; offset *= 2) better += __shfl_xor_sync(FULL_WARP, better, offset);
        if (helper == 0 && e < NUM_EXPERTS && better < NUM_USED) experts[better] = e;
    }
    __syncthreads();
}

// Weights of the picked experts; written by the first warp. Called by the whole block.
__device__ __forceinline__ void weigh(const float* logits, const int* experts, float* weights, bool renormalise) {
    const float best = logits[experts[0]];
    float own = 0.0f;
#pragma unroll 1
    for (int e = threadIdx.x; e < NUM_EXPERTS; e += THREADS) own += expf(logits[e] - best);
    const float total = block_sum(own);
    if (threadIdx.x >= WARP_SIZE) return;
    const int j = threadIdx.x;
    if (j < NUM_USED) weights[j] = expf(logits[experts[j]] - best) / total;
    __syncwarp();
    if (!renormalise) return;
    float sum = 0.0f;
#pragma unroll 1
    for (int i = 0; i < NUM_USED; i++) sum += weights[i];
    __syncwarp();
    if (j < NUM_USED) weights[j] /= sum;
}

// held += more, rounded; returns the sum of squares.
__device__ __forceinline__ float add_to(Vec<T>& held, const Vec<T>& more) {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < SIZE; i++) {
        held.at[i] = from_float<T>(to_float(held.at[i]) + to_float(more.at[i]));
        squares += to_float(held.at[i]) * to_float(held.at[i]);
    }
    return squares;
}

__device__ __forceinline__ Vec<T> normed_by(const Vec<T>& held, const Vec<T>& by, float squares, float eps) {
    const float scale = 1.0f / sqrtf(block_sum(squares) / HIDDEN + eps);
    Vec<T> made;
#pragma unroll
    for (int i = 0; i < SIZE; i++) made.at[i] = from_float<T>(to_float(held.at[i]) * scale * to_float(by.at[i]));
    return made;
}

// A block's work on the row. Each thread holds 8 columns of the residual stream, if there are that many.
struct RowBlock {
    const Operands& in;
    const int* experts;  // of the row, in shared memory
    char* ring;          // of the warp
    char* held_stages;   // of the warp
    T* normed;           // [HIDDEN], in whole rounds of spans
    T* input;            // x, in whole rounds of spans; then logits; then gated rows [NUM_USED][PADDED_INNER]
    float* sums;         // [units][WARPS][TILE_ROWS]
    u64 *row_words, *logit_words, *gated_words, *out_words;
    int column, warp, stage;
    bool has_column;
    u32 launch;
    Position ahead;

    __device__ __forceinline__ RowBlock(const Operands& in, char* shared, const int* experts) : in(in), experts(experts) {
        column = threadIdx.x * SIZE;
        has_column = column < HIDDEN;
        warp = threadIdx.x / WARP_SIZE;
        stage = 0;
        ring = shared + warp * STAGES * STAGE_BYTES;
        held_stages = shared + (WARPS * STAGES + warp * HOLD) * STAGE_BYTES;
        normed = reinterpret_cast<T*>(shared + WARPS * (STAGES + HOLD) * STAGE_BYTES);
        input = normed + ROW_ELEMENTS;
        sums = reinterpret_cast<float*>(reinterpret_cast<char*>(input) + INPUT_BYTES);
        row_words = in.words;
        logit_words = row_words + HIDDEN / 2;
        gated_words = logit_words + LOGIT_WORDS;
        out_words = gated_words + NUM_USED * INNER / 2;
    }

    // A tile of `matrix` [n, width].
    __device__ __forceinline__ void copy_tile(char* to, const T* matrix, int n, int width, int unit, int part) const {
        const int first = (blockIdx.x + unit * BLOCKS) * TILE_ROWS, rows = min(TILE_ROWS, n - first);
        if (rows > 0)
            copy_stage(shared_address(to), matrix + static_cast<i64>(first) * width, width, 0,
                       (part * WARPS + warp) * SPAN, rows);
        commit_copies();
    }

    __device__ __forceinline__ int next_size() const { return in.next == nullptr ? 0 : NEXT_SIZE; }

    // Copies the stage that is next, if it has rows, and commits.
    __device__ __forceinline__ void start_copies(int to_stage) {
        char* to = ring + to_stage * STAGE_BYTES;
        const int span = ahead.part * WARPS + warp, index = blockIdx.x + ahead.unit * BLOCKS;
        if (ahead.kind >= Position::NEXT) {
            copy_tile(to, in.next, ahead.kind == Position::NEXT ? next_size() : 0, HIDDEN, ahead.unit, ahead.part);
        } else if (ahead.kind == Position::GATE) {
            if (index < NUM_ITEMS) {
                const i64 row = experts[index / NUM_TILES] * 2ll * INNER + index % NUM_TILES * GATED_ROWS;
                copy_stage(shared_address(to), in.gate_up + row * HIDDEN, HIDDEN, INNER - GATED_ROWS, span * SPAN, TILE_ROWS);
            }
            commit_copies();
        } else {
            if (index * TILE_ROWS < HIDDEN && span < NUM_USED * DOWN_SPANS) {
                const i64 row = experts[span / DOWN_SPANS] * static_cast<i64>(HIDDEN) + index * TILE_ROWS;
                copy_stage(shared_address(to), in.down + row * INNER, INNER, 0, span % DOWN_SPANS * SPAN, TILE_ROWS);
            }
            commit_copies();
        }
        ahead.advance();
    }

    // Multiplies the ring's oldest stage, then fills it again.
    __device__ __forceinline__ void add_stage(float (&sum)[4], const T* by) {
        wait_for_copies<STAGES - 1>();
        __syncwarp();
        add_products(sum, ring + stage * STAGE_BYTES, by);
        __syncwarp();  // all lanes have read it
        start_copies(stage);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }

    __device__ __forceinline__ void keep_sums(int unit, const float (&sum)[4]) const {
        const int lane = threadIdx.x % WARP_SIZE;
        if (lane % 4 != 0) return;
        sums[(unit * WARPS + warp) * TILE_ROWS + lane / 4] = sum[0];
        sums[(unit * WARPS + warp) * TILE_ROWS + lane / 4 + 8] = sum[2];
    }

    __device__ __forceinline__ float sum_of_warps(int unit, int row, float total) const {
#pragma unroll
        for (int w = 0; w < WARPS; w++) total += sums[(unit * WARPS + w) * TILE_ROWS + row];
        return total;
    }

    // Before the previous kernel has ended: weights whose rows are known.
    __device__ __forceinline__ void fetch_known() {
#if WHOLE_LAYER
#pragma unroll 1
        for (int n = 0; n < STAGES; n++)
            copy_tile(ring + n * STAGE_BYTES, in.output, n < OUTPUT_STAGES ? HIDDEN : 0, ATTENDED, n / OUTPUT_PARTS,
                      n % OUTPUT_PARTS);
#pragma unroll 1
        for (int n = 0; n < HOLD; n++)
            copy_tile(held_stages + n * STAGE_BYTES, in.next, next_size(), HIDDEN, n / ROW_PARTS, n % ROW_PARTS);
#endif
    }

#if WHOLE_LAYER
    // Returns the thread's columns of the product with output.
    __device__ __forceinline__ Vec<T> multiply_output() {
#pragma unroll 1
        for (int k = column; k < X_ELEMENTS; k += THREADS * SIZE)
            store_vec(input + k, k < ATTENDED ? load_vec(in.x + k) : Vec<T>{});
        __syncthreads();
        int read = 0;
#pragma unroll 1
        for (int unit = 0; unit < ROW_UNITS; unit++) {
            float sum[4] = {};
#pragma unroll 1
            for (int part = 0; part < OUTPUT_PARTS; part++, read++) {
                if (read < STAGES)
                    wait_for_copies<STAGES - 1 + HOLD>();  // held stages were requested in between
                else
                    wait_for_copies<STAGES - 1>();
                __syncwarp();
                char* own = ring + read % STAGES * STAGE_BYTES;
                add_products(sum, own, input + (part * WARPS + warp) * SPAN);
                __syncwarp();
                const int later = read + STAGES;
                copy_tile(own, in.output, later < OUTPUT_STAGES ? HIDDEN : 0, ATTENDED, later / OUTPUT_PARTS,
                          later % OUTPUT_PARTS);
            }
            keep_sums(unit, sum);
        }
        __syncthreads();
#pragma unroll 1
        for (int first = 0; first < ROW_UNITS * TILE_ROWS; first += THREADS) {
            const int task = first + threadIdx.x, unit = task / TILE_ROWS, row = task % TILE_ROWS;
            const int n = (blockIdx.x + unit * BLOCKS) * TILE_ROWS + row;
            const bool exists = task < ROW_UNITS * TILE_ROWS && n < HIDDEN;
            float total = 0.0f;
            if (exists) total = sum_of_warps(unit, row, in.output_bias == nullptr ? 0.0f : to_float(in.output_bias[n]));
            if (first + warp * WARP_SIZE < ROW_UNITS * TILE_ROWS)
                publish_pair(row_words + n / 2, from_float<T>(total), exists, launch);
        }
        return has_column ? receive_vec(row_words + column / 2, launch) : Vec<T>{};
    }
#endif

    __device__ __forceinline__ void keep_normed(const Vec<T>& made) const {
        if (column < ROW_ELEMENTS) store_vec(normed + column, made);
    }

    // Gets the logits of all experts, `own` being the block's first row of the router.
    __device__ __forceinline__ void exchange_logits(const Vec<T>& made, Vec<T> own, float* logits, u32* ranks) const {
#pragma unroll 1
        for (int e = blockIdx.x; e < NUM_LOGITS; e += BLOCKS) {
            if (e != blockIdx.x && has_column && e < NUM_EXPERTS)
                own = load_vec(in.router + static_cast<i64>(e) * HIDDEN + column);
            float product = 0.0f;
#pragma unroll
            for (int i = 0; i < SIZE; i++) product = fmaf(to_float(made.at[i]), to_float(own.at[i]), product);
            product = block_sum(product);
            // also without an expert: says that the block has read the residual stream
            if (threadIdx.x == 0) publish(logit_words + e, __float_as_uint(product), launch);
        }
#pragma unroll 1
        for (int e = threadIdx.x; e < NUM_LOGITS; e += THREADS) {
            const float logit = __uint_as_float(receive(logit_words + e, launch));
            if (e >= NUM_EXPERTS) continue;
            logits[e] = logit;
            ranks[e] = rank_of(logit);
        }
        __syncthreads();
    }

    __device__ __forceinline__ void multiply_gate_up() {
#pragma unroll 1
        for (int unit = 0; unit < GATE_UNITS; unit++) {
            float sum[4] = {};
#pragma unroll 1
            for (int part = 0; part < ROW_PARTS; part++) add_stage(sum, normed + (part * WARPS + warp) * SPAN);
            keep_sums(unit, sum);
        }
        __syncthreads();
#pragma unroll 1
        for (int first = 0; first < GATE_UNITS * GATED_ROWS; first += THREADS) {
            const int n = first + threadIdx.x, unit = n / GATED_ROWS, row = n % GATED_ROWS;
            const int item = blockIdx.x + unit * BLOCKS;  // items of an expert are in the order of its rows
            const bool exists = n < GATE_UNITS * GATED_ROWS && item < NUM_ITEMS;
            T value = from_float<T>(0.0f);
            if (exists) {
                const float gate = sum_of_warps(unit, row, 0.0f), up = sum_of_warps(unit, row + GATED_ROWS, 0.0f);
                value = gated(from_float<T>(gate), from_float<T>(up));
            }
            if (first + warp * WARP_SIZE < GATE_UNITS * GATED_ROWS)
                publish_pair(gated_words + (item * GATED_ROWS + row) / 2, value, exists, launch);
        }
    }

    __device__ __forceinline__ void receive_gated() const {
        constexpr int AT_ONCE = 2;
        constexpr int NUM_VECS = NUM_USED * PADDED_INNER / SIZE;
#pragma unroll 1
        for (int first = threadIdx.x; first < NUM_VECS; first += AT_ONCE * THREADS) {
            const u64* from[AT_ONCE];
            uint4 received[AT_ONCE] = {};
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const int n = first + i * THREADS, pair = n * SIZE / PADDED_INNER, k = n * SIZE % PADDED_INNER;
                from[i] = n < NUM_VECS && k < INNER ? gated_words + (pair * INNER + k) / 2 : nullptr;
            }
            receive_vecs(received, from, launch);
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
                if (first + i * THREADS < NUM_VECS) reinterpret_cast<uint4*>(input)[first + i * THREADS] = received[i];
        }
        __syncthreads();
    }

    // `of_pairs` [NUM_USED][TILE_ROWS] in shared memory.
    __device__ __forceinline__ void multiply_down(const float* weights, float* of_pairs) {
#pragma unroll 1
        for (int unit = 0; unit < ROW_UNITS; unit++) {
#pragma unroll 1
            for (int part = 0; part < DOWN_PARTS; part++) {
                const int both = min(part * WARPS + warp, NUM_USED * DOWN_SPANS - 1);  // past the last: not read
                float sum[4] = {};
                add_stage(sum, input + both * SPAN);
                keep_sums(part, sum);
            }
            __syncthreads();
            const int row = threadIdx.x % TILE_ROWS;
            if (threadIdx.x < NUM_USED * TILE_ROWS) {
                float of_pair = 0.0f;
#pragma unroll 4
                for (int span = 0; span < DOWN_SPANS; span++)
                    of_pair += sums[(threadIdx.x / TILE_ROWS * DOWN_SPANS + span) * TILE_ROWS + row];
                of_pairs[threadIdx.x] = to_float(from_float<T>(of_pair));
            }
            __syncthreads();
            if (warp != 0) continue;
            const int n = (blockIdx.x + unit * BLOCKS) * TILE_ROWS + row;
            const bool exists = threadIdx.x < TILE_ROWS && n < HIDDEN;
            float total = 0.0f;
#pragma unroll 8
            for (int j = 0; j < NUM_USED; j++) total = fmaf(weights[j], of_pairs[j * TILE_ROWS + row], total);
            if (WHOLE_LAYER)
                publish_pair(out_words + n / 2, from_float<T>(total), exists, launch);
            else if (exists)
                in.out[n] = from_float<T>(total);
        }
    }

#if WHOLE_LAYER
    __device__ __forceinline__ void multiply_next(const Vec<T>& made) {
        keep_normed(made);
        __syncthreads();
        const int num_units = in.next == nullptr ? 0 : NEXT_UNITS;
#pragma unroll 1
        for (int unit = 0; unit < num_units; unit++) {
            float sum[4] = {};
#pragma unroll 1
            for (int part = 0; part < ROW_PARTS; part++) {
                const int index = unit * ROW_PARTS + part;
                const T* by = normed + (part * WARPS + warp) * SPAN;
                if (index >= HOLD) {
                    add_stage(sum, by);
                    continue;
                }
                wait_for_copies<STAGES>();
                __syncwarp();
                add_products(sum, held_stages + index * STAGE_BYTES, by);
            }
            keep_sums(unit, sum);
        }
        __syncthreads();
#pragma unroll 1
        for (int task = threadIdx.x; task < num_units * TILE_ROWS; task += THREADS) {
            const int unit = task / TILE_ROWS, row = task % TILE_ROWS, n = (blockIdx.x + unit * BLOCKS) * TILE_ROWS + row;
            if (n < NEXT_SIZE)
                in.out[n] =
                    from_float<T>(sum_of_warps(unit, row, in.next_bias == nullptr ? 0.0f : to_float(in.next_bias[n])));
        }
        if (in.next == nullptr && blockIdx.x == 0 && has_column) store_vec(in.out + column, made);
    }
#endif
};

__device__ __forceinline__ void run_row(const Operands& in) {
    extern __shared__ __align__(128) char shared[];
    __shared__ int experts[NUM_USED];
    __shared__ float weights[NUM_USED];
    __shared__ float of_pairs[NUM_USED * TILE_ROWS];
    __shared__ u32 ranks[NUM_EXPERTS];
    RowBlock block(in, shared, experts);
    const int column = block.column;

    start_next_kernel();
    block.fetch_known();
    Vec<T> by = {}, own_router = {}, held = {}, more = {};
#if WHOLE_LAYER
    Vec<T> next_by = {};
    if (block.has_column) next_by = load_vec(in.next_norm + column);
#endif
    if (block.has_column) {
        by = load_vec(in.norm + column);
        if (blockIdx.x < NUM_EXPERTS) own_router = load_vec(in.router + static_cast<i64>(blockIdx.x) * HIDDEN + column);
    }
    wait_for_previous_kernel();
    block.launch = __ldcg(in.launches + blockIdx.x) + 1;
    const bool is_padding = in.slots != nullptr && (*in.slots < 0 || *in.slots >= in.num_slots);
    if (block.has_column) held = load_vec(in.residual + column);
#if WHOLE_LAYER
    more = block.multiply_output();
#else
    if (block.has_column) more = load_vec(in.x + column);
#endif
    Vec<T> made = normed_by(held, by, add_to(held, more), in.eps);
    block.keep_normed(made);
    float* logits = reinterpret_cast<float*>(block.input);
    block.exchange_logits(made, own_router, logits, ranks);

    more = {};
    block.ahead = {Position::GATE, 0, 0};
    if (is_padding)
        block.ahead.skip_held();
    else
        pick(ranks, experts);
#pragma unroll 1
    for (int stage = 0; stage < STAGES; stage++) block.start_copies(stage);
    if (!is_padding) {
        weigh(logits, experts, weights, in.renormalise);
        block.multiply_gate_up();
        block.receive_gated();
        block.multiply_down(weights, of_pairs);
#if WHOLE_LAYER
        if (block.has_column) more = receive_vec(block.out_words + column / 2, block.launch);
    }
    block.multiply_next(normed_by(held, next_by, add_to(held, more), in.eps));
#else
    } else {
#pragma unroll 1
        for (int tile = blockIdx.x; tile < HIDDEN / TILE_ROWS; tile += BLOCKS)
            if (threadIdx.x < TILE_ROWS) in.out[tile * TILE_ROWS + threadIdx.x] = from_float<T>(0.0f);
    }
#endif
    if (blockIdx.x == 0 && block.has_column) store_vec(in.residual + column, held);  // all have read it
    if (threadIdx.x == 0) in.launches[blockIdx.x] = block.launch;
    wait_for_copies<0>();
}
