// experts_row: MoE layer of one row in one launch: add_rms_norm, router, experts and their weighted sum.
//
//   x, residual, norm [HIDDEN], router [NUM_EXPERTS, HIDDEN], gate_up [NUM_EXPERTS, 2 INNER, HIDDEN]
//   down [NUM_EXPERTS, HIDDEN, INNER], out [HIDDEN]; slots int64 [1] or null: outside 0..num_slots - 1 is padding, out
//   0; aligned to 16 bytes
//   Build macros: these sizes, NUM_USED up to 32, BLOCKS, STAGES (of a warp's ring); HIDDEN a multiple of 16 up to
//   4096, INNER of 8, NUM_EXPERTS up to 1024. Constants avoid divisions and shorten the code that is fetched.
//   words u64 [max(NUM_EXPERTS, BLOCKS) + 1 + NUM_USED INNER / 2], launches u32 [BLOCKS]: 0 before the first launch
//   grid (BLOCKS, at most the SMs: all must run at once), block (512), shared memory: rings, row, gated rows, sums
//   reference: NumpyOps.add_norm_experts
//   roofline: 3 k H I elements: 75 MB for Qwen3-30B-A3B, 18 us on an H200
//
// Every block norms the row and picks the experts from all blocks' logits. Its warps then stream weights through rings,
// `down` right after `gate_up`. Blocks exchange logits and gated products in words (row_words.cuh). Products for all
// but the last round of `down` are published early, and each warp waits only for its own elements, so `down`'s weights
// are in flight when the last products arrive. A block requests all but one stage of `down` only after its `gate_up`,
// which others still read.
#include "common/mma.cuh"
#include "common/product_types.cuh"
#include "experts/rank_of.cuh"
#include "experts/row_words.cuh"
#include "layer/gated.cuh"

constexpr int WARPS = 16;
constexpr int THREADS = WARP_SIZE * WARPS;
constexpr int SIZE = Vec<T>::SIZE;
constexpr int SPAN = 128;      // columns per turn of a warp
constexpr int STEP = 64;       // columns per stage
constexpr int PARTS = SPAN / STEP;
constexpr int TILE_ROWS = 16;  // weight rows per stage
constexpr int GATED_ROWS = 8;  // gate rows of a gate_up tile, then their up rows
constexpr int VECS = STEP / SIZE;
constexpr int STAGE_BYTES = TILE_ROWS * STEP * sizeof(T);

constexpr int rounds(int count, int of) { return (count + of - 1) / of; }
constexpr int larger(int a, int b) { return a > b ? a : b; }

constexpr int NUM_TILES = INNER / GATED_ROWS;                  // of gate_up, per expert
constexpr int NUM_ITEMS = NUM_TILES * NUM_USED;                // gate_up tiles of the row's experts
constexpr int GATE_UNITS = rounds(NUM_ITEMS, BLOCKS);            // per block
constexpr int DOWN_UNITS = rounds(HIDDEN / TILE_ROWS, BLOCKS);
constexpr int GATE_PARTS = PARTS * rounds(HIDDEN, WARPS * SPAN);  // stages per warp and unit
constexpr int DOWN_SPANS = rounds(INNER, SPAN);
constexpr int DOWN_ROUNDS = rounds(DOWN_SPANS * NUM_USED, WARPS);
constexpr int DOWN_PARTS = PARTS * DOWN_ROUNDS;
constexpr int EARLY_SPANS = (DOWN_ROUNDS - 1) * WARPS;  // of gated products in all but the last round
constexpr int EARLY_ITEMS = EARLY_SPANS / DOWN_SPANS * NUM_TILES + EARLY_SPANS % DOWN_SPANS * (SPAN / GATED_ROWS);
constexpr int EARLY_UNITS = rounds(EARLY_ITEMS, BLOCKS);
constexpr int NUM_LOGITS = larger(NUM_EXPERTS, BLOCKS);  // at least one per block
constexpr int LOGIT_WORDS = rounds(NUM_LOGITS, 2) * 2;   // keeps the next words aligned

constexpr int PADDED_INNER = DOWN_SPANS * SPAN;
constexpr int ROW_ELEMENTS = GATE_PARTS * WARPS * STEP;
constexpr int GATED_BYTES = larger(NUM_USED * PADDED_INNER * 2, rounds(NUM_EXPERTS, 4) * 16);

struct Operands {
    const T* x;
    T* residual;
    const T* norm;
    const T* router;
    const T* gate_up;
    const T* down;
    T* out;
    u64* words;
    u32 launch;  // launch number
};

// First column of a warp's stage `part` of a unit.
__device__ __forceinline__ int column_of(int part, int warp) {
    return (part / PARTS * WARPS + warp) * SPAN + part % PARTS * STEP;
}

struct Position {
    bool is_down;
    int unit, part;

    __device__ __forceinline__ void advance() {
        part++;
        if (part < (is_down ? DOWN_PARTS : GATE_PARTS)) return;
        part = 0;
        unit++;
        if (is_down || unit < GATE_UNITS) return;
        unit = 0;
        is_down = true;
    }
};

// Rows g and g + 8 of a stage times STEP columns `by` in shared memory; complete in lanes with t = 0.
__device__ __forceinline__ void add_products(float (&sum)[4], const char* stage, const T* by) {
    const int lane = threadIdx.x % WARP_SIZE, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int c = 0; c < STEP / 32; c++) {
        const uint4 x = load_shared(by + c * 32 + t * SIZE);
        const uint4 low = load_shared(stage + row_pair_offset<VECS>(g, c * 4 + t));
        const uint4 high = load_shared(stage + row_pair_offset<VECS>(g + 8, c * 4 + t));
        mma_16x8x32(sum, low, high, x);
    }
}

// Starts copying STEP columns from `column` of 16 rows of `width` elements at `from`, the last 8 of them `jump` rows
// further. Not inlined: the kernel runs once, so less code is fetched.
__device__ __noinline__ void copy_stage(u32 stage, const T* from, int width, int jump, int column) {
    const int lane = threadIdx.x % WARP_SIZE, vec = lane % VECS;
    column += vec * SIZE;
#pragma unroll
    for (int n = 0; n < TILE_ROWS * VECS / WARP_SIZE; n++) {
        const int row = lane / VECS + n * (WARP_SIZE / VECS);
        const bool wanted = column < width;
        const T* own = from + static_cast<i64>(row + (row < GATED_ROWS ? 0 : jump)) * width + column;
        copy_streamed_16(stage + row_pair_offset<VECS>(row, vec), wanted ? own : from, wanted);
    }
}

// Picks the experts with the best logits, best first, ties by lower id. Called by the whole block.
__device__ __forceinline__ void pick(const u32* ranks, int* experts) {
    constexpr int HELPERS = 4;  // threads per expert
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

// Weights of the picked experts, written by the first warp. Called by the whole block.
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

// A block's work on the row. A thread holds 8 columns of the residual stream, if any.
struct RowBlock {
    const Operands& in;
    const int* experts;  // of the row, in shared memory
    char* ring;          // of the warp
    T* normed;           // [HIDDEN], padded to whole rounds of spans
    T* gated_rows;       // [NUM_USED][PADDED_INNER]; earlier the logits
    float* sums;         // [GATE_UNITS + DOWN_ROUNDS][WARPS][TILE_ROWS]
    u64 *logit_words, *gated_words;
    int column, warp, stage;
    bool has_column;
    Position ahead;
    int held = 0;  // ring stages held back until gate_up ends

    __device__ __forceinline__ RowBlock(const Operands& in, char* shared, const int* experts)
        : in(in), experts(experts), ahead{false, 0, 0} {
        column = threadIdx.x * SIZE;
        has_column = column < HIDDEN;
        warp = threadIdx.x / WARP_SIZE;
        stage = 0;
        ring = shared + warp * STAGES * STAGE_BYTES;
        normed = reinterpret_cast<T*>(shared + WARPS * STAGES * STAGE_BYTES);
        gated_rows = normed + ROW_ELEMENTS;
        sums = reinterpret_cast<float*>(reinterpret_cast<char*>(gated_rows) + GATED_BYTES);
        logit_words = in.words;
        gated_words = logit_words + LOGIT_WORDS;
    }

    // Copies the next stage, if it has rows, and commits. `holds`: stages of `down` after its first are held back.
    __device__ __forceinline__ void start_copies(int to_stage, bool holds) {
        if (holds && ahead.is_down && ahead.part > 0) {
            held++;
            commit_copies();
            return;
        }
        const u32 to = shared_address(ring + to_stage * STAGE_BYTES);
        const int index = blockIdx.x + ahead.unit * BLOCKS;
        if (!ahead.is_down) {
            if (index < NUM_ITEMS) {
                const i64 row = experts[index / NUM_TILES] * 2ll * INNER + index % NUM_TILES * GATED_ROWS;
                copy_stage(to, in.gate_up + row * HIDDEN, HIDDEN, INNER - GATED_ROWS, column_of(ahead.part, warp));
            }
        } else {
            const int span = ahead.part / PARTS * WARPS + warp;
            if (ahead.unit < DOWN_UNITS && index * TILE_ROWS < HIDDEN && span < NUM_USED * DOWN_SPANS) {
                const i64 row = experts[span / DOWN_SPANS] * static_cast<i64>(HIDDEN) + index * TILE_ROWS;
                copy_stage(to, in.down + row * INNER, INNER, 0, span % DOWN_SPANS * SPAN + ahead.part % PARTS * STEP);
            }
        }
        commit_copies();
        ahead.advance();
    }

    // Multiplies the ring's oldest stage, then refills it.
    __device__ __forceinline__ void add_stage(float (&sum)[4], const T* by, bool holds) {
        wait_for_copies<STAGES - 1>();
        __syncwarp();
        add_products(sum, ring + stage * STAGE_BYTES, by);
        __syncwarp();  // all lanes have read it
        start_copies(stage, holds);
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

    // Exchanges the logits of all experts. `own`: the block's first router row.
    __device__ __forceinline__ void exchange_logits(const Vec<T>& made, Vec<T> own, float* logits, u32* ranks) const {
#pragma unroll 1
        for (int e = blockIdx.x; e < NUM_LOGITS; e += BLOCKS) {
            if (e != blockIdx.x && has_column && e < NUM_EXPERTS)
                own = load_vec(in.router + static_cast<i64>(e) * HIDDEN + column);
            float product = 0.0f;
#pragma unroll
            for (int i = 0; i < SIZE; i++) product = fmaf(to_float(made.at[i]), to_float(own.at[i]), product);
            product = block_sum(product);
            // even without an expert: signals that the block has read the residual stream
            if (threadIdx.x == 0) publish(logit_words + e, __float_as_uint(product), in.launch);
        }
#pragma unroll 1
        for (int e = threadIdx.x; e < NUM_LOGITS; e += THREADS) {
            const float logit = __uint_as_float(receive(logit_words + e, in.launch));
            if (e >= NUM_EXPERTS) continue;
            logits[e] = logit;
            ranks[e] = rank_of(logit);
        }
        __syncthreads();
    }

    // Publishes the gated products of units `begin` to `end`, whose sums all warps have stored.
    __device__ __forceinline__ void publish_units(int begin, int end) const {
#pragma unroll 1
        for (int first = begin * GATED_ROWS; first < end * GATED_ROWS; first += THREADS) {
            const int n = first + threadIdx.x, unit = n / GATED_ROWS, row = n % GATED_ROWS;
            const int item = blockIdx.x + unit * BLOCKS;  // items of an expert are in the order of its rows
            const bool exists = n < end * GATED_ROWS && item < NUM_ITEMS;
            T value = from_float<T>(0.0f);
            if (exists) {
                const float gate = sum_of_warps(unit, row, 0.0f), up = sum_of_warps(unit, row + GATED_ROWS, 0.0f);
                value = gated(from_float<T>(gate), from_float<T>(up));
            }
            if (first + warp * WARP_SIZE < end * GATED_ROWS)
                publish_pair(gated_words + (item * GATED_ROWS + row) / 2, value, exists, in.launch);
        }
    }

    __device__ __forceinline__ void multiply_gate_up(int begin, int end) {
#pragma unroll 1
        for (int unit = begin; unit < end; unit++) {
            float sum[4] = {};
#pragma unroll 1
            for (int part = 0; part < GATE_PARTS; part++) add_stage(sum, normed + column_of(part, warp), true);
            keep_sums(unit, sum);
        }
        if (end == GATE_UNITS) {
#pragma unroll 1
            for (; held > 0; held--) start_copies((stage + STAGES - held) % STAGES, false);
        }
        __syncthreads();
        publish_units(begin, end);
    }

    // Receives the gated products of a span that only this warp multiplies.
    __device__ __forceinline__ void receive_span(int span) const {
        const int four = threadIdx.x % WARP_SIZE * 4, k = span % DOWN_SPANS * SPAN + four;
        uint2 received = {};
        if (k < INNER) received = receive_four(gated_words + (span / DOWN_SPANS * INNER + k) / 2, in.launch);
        *reinterpret_cast<uint2*>(gated_rows + span * SPAN + four) = received;
        __syncwarp();
    }

    // `of_pairs` [NUM_USED][TILE_ROWS] in shared memory.
    __device__ __forceinline__ void multiply_down(const float* weights, float* of_pairs) {
        const float* of_spans = sums + GATE_UNITS * WARPS * TILE_ROWS;
#pragma unroll 1
        for (int unit = 0; unit < DOWN_UNITS && (blockIdx.x + unit * BLOCKS) * TILE_ROWS < HIDDEN; unit++) {
#pragma unroll 1
            for (int round = 0; round < DOWN_ROUNDS; round++) {
                const int span = round * WARPS + warp, last = NUM_USED * DOWN_SPANS - 1;
                if (unit == 0 && span <= last) receive_span(span);
                float sum[4] = {};
#pragma unroll 1
                for (int part = 0; part < PARTS; part++)  // sums of spans past the last are not read
                    add_stage(sum, gated_rows + min(span, last) * SPAN + part * STEP, false);
                keep_sums(GATE_UNITS + round, sum);
            }
            __syncthreads();
            const int row = threadIdx.x % TILE_ROWS;
            if (threadIdx.x < NUM_USED * TILE_ROWS) {
                float of_pair = 0.0f;
#pragma unroll 4
                for (int span = 0; span < DOWN_SPANS; span++)
                    of_pair += of_spans[(threadIdx.x / TILE_ROWS * DOWN_SPANS + span) * TILE_ROWS + row];
                of_pairs[threadIdx.x] = to_float(from_float<T>(of_pair));
            }
            __syncthreads();
            if (warp != 0) continue;
            const int n = (blockIdx.x + unit * BLOCKS) * TILE_ROWS + row;
            const bool exists = threadIdx.x < TILE_ROWS && n < HIDDEN;
            float total = 0.0f;
#pragma unroll 8
            for (int j = 0; j < NUM_USED; j++) total = fmaf(weights[j], of_pairs[j * TILE_ROWS + row], total);
            if (exists) in.out[n] = from_float<T>(total);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    experts_row(const T* x, T* residual, const T* norm, const T* router, const T* gate_up, const T* down, const i64* slots,
                T* out, u64* words, u32* launches, int renormalise, i64 num_slots, float eps) {
    extern __shared__ __align__(128) char shared[];
    __shared__ int experts[NUM_USED];
    __shared__ float weights[NUM_USED];
    __shared__ float of_pairs[NUM_USED * TILE_ROWS];
    __shared__ u32 ranks[NUM_EXPERTS];
    Operands in = {x, residual, norm, router, gate_up, down, out, words, 0};
    RowBlock block(in, shared, experts);
    const int column = block.column;

    start_next_kernel();
    Vec<T> by = {}, own_router = {}, held = {}, more = {};
    if (block.has_column) {
        by = load_vec(norm + column);
        if (blockIdx.x < NUM_EXPERTS) own_router = load_vec(router + static_cast<i64>(blockIdx.x) * HIDDEN + column);
    }
    wait_for_previous_kernel();
    in.launch = __ldcg(launches + blockIdx.x) + 1;
    const bool is_padding = slots != nullptr && (*slots < 0 || *slots >= num_slots);
    if (block.has_column) {
        held = load_vec(residual + column);
        more = load_vec(x + column);
    }
    const Vec<T> made = normed_by(held, by, add_to(held, more), eps);
    if (column < ROW_ELEMENTS) store_vec(block.normed + column, made);
    float* logits = reinterpret_cast<float*>(block.gated_rows);
    block.exchange_logits(made, own_router, logits, ranks);

    if (blockIdx.x == 0 && block.has_column) store_vec(residual + column, held);  // all blocks have read it
    if (threadIdx.x == 0) launches[blockIdx.x] = in.launch;
    if (is_padding) {
#pragma unroll 1
        for (int tile = blockIdx.x; tile < HIDDEN / TILE_ROWS; tile += BLOCKS)
            if (threadIdx.x < TILE_ROWS) out[tile * TILE_ROWS + threadIdx.x] = from_float<T>(0.0f);
        return;
    }
    pick(ranks, experts);
#pragma unroll 1
    for (int n = 0; n < STAGES; n++) block.start_copies(n, true);
#pragma unroll 1
    for (int half = 0; half < 2; half++) {
        block.multiply_gate_up(half == 0 ? 0 : EARLY_UNITS, half == 0 ? EARLY_UNITS : GATE_UNITS);
        if (half == 0) weigh(logits, experts, weights, renormalise);
    }
    block.multiply_down(weights, of_pairs);
    wait_for_copies<0>();
}
