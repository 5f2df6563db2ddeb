// small_m_lora_sm90: out = x @ weight.T + bias, plus what the rows' LoRA adapters add, rounded once.
//
//   x, weight, bias, out, grid, reference of the product: as in small_m_sm90; block LORA_THREADS
//   shrunk float32 [C, M, P, R] of lora_shrink; rows int32 [M], tiles int32 [G, 3] of at most 16 rows, ranks int32 [S]: as
//   there; b [S, N, R], finite, zeros beyond the rank; R = 16 RANK_STEPS, M <= COLS, G <= MAX_TILES
//   b_map0..2: 3-D maps of b, the rows of each part (the last repeated), boxes of 16 x ROWS x 1 in the 32-byte swizzle;
//   outputs of the parts end at first_end, second_end, N
//   reference: NumpyOps.linear, lora_expand
//   roofline: as small_m_sm90, and B of each adapter of the step read once, N rank elements
//
// A tile's sums go on over the ranks of each adapter, with zeros for other rows: exact, so that a row's sums do not
// depend on the batch. Four warps, the helpers, make these operands of `shrunk`, two numbers of 16 bits each, in the
// place of x in the ring. Where two blocks split K, the first takes all adapters.
#define WEIGHT_ELEMENTS 64
#define X_BOXES 1
#define OUT_FLOAT 0
#define MAX_TILES (COLS + COLS / 8)
#define COMPACT_BYTES (COLS * RANK_STEPS * 64)
#define LIST_BYTES (4 * MAX_TILES * RANK_STEPS + 8 * COLS + 16)
#define SCALE_BYTES (8 + 8 * (STAGES + STAGES % 2) + LIST_BYTES + COMPACT_BYTES)
#include "linear/small_m.cuh"

constexpr int HELPERS = 4;  // warps
constexpr int HELPER_THREADS = HELPERS * WARP_SIZE;
constexpr int LORA_THREADS = CONSUMERS + WARP_SIZE + HELPER_THREADS;
constexpr int STEPS = 2;  // of 16 ranks in a stage
constexpr int STEP_WEIGHTS = ROWS * 32;  // bytes of B
constexpr int HALF_STEP = COLS * 32;     // bytes of rounded operands; as many of what rounding left out
constexpr int MAX_STEPS = MAX_TILES * RANK_STEPS;
static_assert(STAGES >= HELPERS, "a helper's stage is opened after its previous one");
static_assert(COLS <= 128, "a first row has 7 bits");

__device__ __forceinline__ void meet_helpers() { sync_named_barrier(1, HELPER_THREADS); }

// 16 ranks of a tile: slot in 16 bits, rank step in 4, first row in 7, rows - 1 in 5.
struct Step {
    u32 packed;

    __device__ __forceinline__ int slot() const { return packed & 0xffff; }
    __device__ __forceinline__ int rank_step() const { return packed >> 16 & 15; }
    __device__ __forceinline__ int first() const { return packed >> 20 & 127; }
    __device__ __forceinline__ int num_rows() const { return (packed >> 27) + 1; }
};

// Behind the ring's barriers: steps of the batch, and what helpers need of its rows.
struct Adapters {
    u32 listed, open_ring;
    u32 *steps, *num_steps, *num_sorted;
    int *row_of, *rank_of;  // by sorted row
    unsigned char* compact;  // of one part: [sorted row][rank step][rounded, rest][16] elements

    __device__ __forceinline__ Adapters(const Shared& shared, unsigned char* memory) {
        const u32 first = shared.x_scales();
        listed = first;
        open_ring = first + 8;
        unsigned char* at = memory + (first - shared_address(memory)) + 8 + 8 * STAGES + STAGES % 2 * 8;
        steps = reinterpret_cast<u32*>(at);
        row_of = reinterpret_cast<int*>(steps + MAX_STEPS);
        rank_of = row_of + COLS;
        num_steps = reinterpret_cast<u32*>(rank_of + COLS);
        num_sorted = num_steps + 1;
        compact = reinterpret_cast<unsigned char*>(num_steps + 4);
    }
    __device__ __forceinline__ u32 open(u32 number) const { return open_ring + number % STAGES * 8; }
};

// Parts of the outputs that a tile has.
struct Parts {
    int first, count;

    __device__ __forceinline__ Parts(int row, int n_size, int first_end, int second_end) {
        const int last_row = min(row + ROWS, n_size) - 1;
        first = (row >= first_end) + (row >= second_end);
        count = (last_row >= first_end) + (last_row >= second_end) - first + 1;
    }
};

__device__ __forceinline__ u64 narrow_operand(u32 address) {
    // Rows of 32 bytes in the 32-byte swizzle: chunks of 16 bytes swap in rows 4 to 7 of eight.
    return (3ull << 62) | (static_cast<u64>(256 >> 4) << 32) | (1ull << 16) | ((address & 0x3ffff) >> 4);
}

__device__ __forceinline__ void copy_adapter(u32 to_shared, const TensorMap& map, int x, int y, int z, u32 barrier,
                                             u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%2, %3, %4}], [%5], %6;"
        :
        : "r"(to_shared), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier), "l"(policy)
        : "memory");
}

// A warp lists steps of tiles in their order; nothing of it is written by kernels of this step.
__device__ __forceinline__ void list_steps(const Adapters& adapters, const int* rows, const int* tiles,
                                           const int* ranks, int num_tiles, int num_sorted) {
    const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
    for (int m = lane; m < COLS; m += WARP_SIZE)
        if (m < num_sorted) adapters.row_of[m] = rows[m];
    u32 listed = 0;
    int sorted = 0;
    for (int base = 0; base < num_tiles; base += WARP_SIZE) {
        const int g = base + lane;
        const int slot = g < num_tiles ? tiles[3 * g] : 0, first = g < num_tiles ? tiles[3 * g + 1] : 0;
        const int count = g < num_tiles ? tiles[3 * g + 2] : 0;
        const int rank = count > 0 ? ranks[slot] : 0;
        const u32 own = (rank + 15) / 16;
        u32 before = own;
#pragma unroll
        for (int offset = 1; offset < WARP_SIZE; offset *= 2) {
            const u32 left = __shfl_up_sync(FULL_WARP, before, offset);
            if (lane >= offset) before += left;
        }
        const u32 at = listed + before - own;
        for (u32 r = 0; r < own; ++r)
            adapters.steps[at + r] = slot | r << 16 | static_cast<u32>(first) << 20 | static_cast<u32>(count - 1) << 27;
        for (int m = first; m < first + count; ++m) adapters.rank_of[m] = rank;
        listed += __shfl_sync(FULL_WARP, before, WARP_SIZE - 1);
        sorted = max(sorted, warp_max(first + count));
    }
    if (lane == 0) {
        *adapters.num_steps = listed;
        *adapters.num_sorted = sorted;
    }
    __syncwarp();
    if (lane == 0) arrive(adapters.listed);
}

struct Shrunk {
    const float* values;
    int num_splits, num_sorted, num_parts, max_rank;

    __device__ __forceinline__ float4 sum(int row, int part, int r) const {
        const float* from = values + (static_cast<i64>(row) * num_parts + part) * max_rank + r;
        const i64 stride = static_cast<i64>(num_sorted) * num_parts * max_rank;
        float4 sum = {};
#pragma unroll 4
        for (int c = 0; c < num_splits; ++c) {
            float4 more;  // past the L1: written during this kernel
            asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                         : "=f"(more.x), "=f"(more.y), "=f"(more.z), "=f"(more.w)
                         : "l"(from + c * stride)
                         : "memory");
            sum = make_float4(sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w);
        }
        return sum;
    }
};

// The helpers round one part's operands of all rows.
__device__ __forceinline__ void round_part(const Adapters& adapters, const Shrunk& shrunk, int part, int thread) {
    const int num_quads = *adapters.num_sorted * RANK_STEPS * 4;
    for (int task = thread; task < num_quads; task += HELPER_THREADS) {
        const int row = task / (RANK_STEPS * 4), r = task % (RANK_STEPS * 4) * 4, rank = adapters.rank_of[row];
        float4 sum = {};
        if (r < rank) sum = shrunk.sum(row, part, r);
        // beyond the rank: undefined
        const float values[4] = {sum.x, r + 1 < rank ? sum.y : 0.0f, r + 2 < rank ? sum.z : 0.0f,
                                 r + 3 < rank ? sum.w : 0.0f};
        u32 rounded[2], rest[2];
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
            rounded[pair] = pack_pair(values[2 * pair], values[2 * pair + 1]);
            const float2 known = unpack_pair(rounded[pair]);
            rest[pair] = pack_pair(values[2 * pair] - known.x, values[2 * pair + 1] - known.y);
        }
        unsigned char* to = adapters.compact + (row * RANK_STEPS + r / 16) * 64 + r % 16 * 2;
        *reinterpret_cast<uint2*>(to) = make_uint2(rounded[0], rounded[1]);
        *reinterpret_cast<uint2*>(to + 32) = make_uint2(rest[0], rest[1]);
    }
}

// A warp makes a stage's operands: zeros but in the rows of its steps.
__device__ __forceinline__ void build_stage(const Adapters& adapters, unsigned char* stage, u32 first_step,
                                            u32 num_steps) {
    const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll 8
    for (int vec = lane; vec < STEPS * 2 * HALF_STEP / 16; vec += WARP_SIZE)
        reinterpret_cast<uint4*>(stage)[vec] = make_uint4(0, 0, 0, 0);
    __syncwarp();
#pragma unroll
    for (u32 n = 0; n < STEPS; ++n) {
        if (first_step + n >= num_steps) break;
        const Step step{adapters.steps[first_step + n]};
        for (int task = lane; task < step.num_rows() * 4; task += WARP_SIZE) {
            const int sorted = step.first() + task / 4, half = task / 2 % 2, chunk = task % 2;
            const int row = adapters.row_of[sorted];
            const unsigned char* from =
                adapters.compact + (sorted * RANK_STEPS + step.rank_step()) * 64 + half * 32 + chunk * 16;
            unsigned char* to =
                stage + (2 * n + half) * HALF_STEP + row * 32 + (chunk ^ (row / 4 % 2)) * 16;
            *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
        }
    }
    publish_stores();
    __syncwarp();
}

// A warp's rows of the output tile; bias of this thread's two.
struct OutputTile {
    Out* out;
    int first, end;  // weight rows of this warp
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

    // Stores rows 8 chunk .. 8 chunk + 7 of x, transposed for adjacent stores; N is even.
    __device__ __forceinline__ void store(int chunk, const float (&four)[4]) const {
        const int g = threadIdx.x % WARP_SIZE / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 pair = transpose_matrix(pack_pair(four[2 * half] + bias[half], four[2 * half + 1] + bias[half]));
            const int m = 8 * chunk + g, n = first + 8 * half + 2 * t;
            if (m < num_rows && n < end) *reinterpret_cast<u32*>(out + static_cast<i64>(m) * n_size + n) = pair;
        }
    }
};

extern "C" __global__ void SMALL_M_CLUSTER __launch_bounds__(LORA_THREADS, 1)
    small_m_lora_sm90(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap weight_map,
                      const __grid_constant__ TensorMap b_map0, const __grid_constant__ TensorMap b_map1,
                      const __grid_constant__ TensorMap b_map2, const T* bias, Out* out, const float* shrunk,
                      const int* rows, const int* tiles, const int* ranks, int num_rows, int n_size, int k_size,
                      int num_splits, int num_sorted, int num_tiles, int num_parts, int max_rank, int first_end,
                      int second_end) {
    extern __shared__ unsigned char memory[];
    const Shared shared{(shared_address(memory) + 1023) / 1024 * 1024};
    const BlockWork work(n_size, k_size);
    const Adapters adapters(shared, memory);
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    const bool is_producer = threadIdx.x == CONSUMERS, is_helper = threadIdx.x >= CONSUMERS + WARP_SIZE;
    const int helper_thread = threadIdx.x - CONSUMERS - WARP_SIZE, helper = warp - CONSUMERS / WARP_SIZE - 1;
    const u64 policy = policy_of_read_once();
    const auto fetch_weights = [&](u32 iteration, int row, int span) {
        arrive_expecting(shared.full(iteration), STAGE_BYTES);
        arrive(shared.full(iteration));  // in a helper's place
        copy_box(shared.weights(iteration), weight_map, span * BOX_ELEMENTS, row, shared.full(iteration), policy);
    };

    start_next_kernel();
    if (is_producer) {
        prefetch_map(weight_map);
        prefetch_map(x_map);
        for (int stage = 0; stage < STAGES; ++stage) {
            make_barrier(shared.full(stage), 2);  // by the producer and a helper
            make_barrier(shared.empty(stage), CONSUMERS / WARP_SIZE);
            make_barrier(adapters.open(stage), 1);
        }
        make_barrier(shared.all_sent(), 1);
        make_barrier(adapters.listed, 1);
        publish_barriers();
        if (SPLIT == 2) arrive_expecting(shared.all_sent(), SENT_BYTES);
        for (u32 iteration = 0; iteration < min(AHEAD, work.num_spans); ++iteration)
            fetch_weights(iteration, work.first_row(0), work.first_span + iteration);
    }
    __syncthreads();
    if (SPLIT == 2) arrive_at_cluster();
    const Shrunk sums{shrunk, num_splits, num_sorted, num_parts, max_rank};
    if (is_helper) {
        if (helper == 0) list_steps(adapters, rows, tiles, ranks, num_tiles, num_sorted);
        wait_for(adapters.listed, 0);
    }
    wait_for_previous_kernel();

    if (threadIdx.x < CONSUMERS) {
        const bool arrives = lane == 0;
        const u32 group = threadIdx.x / WARPGROUP_SIZE;
        u32 iteration = 0;
        const auto sum_spans = [&](Sums& sum, u32 count) {
            clear(sum);
            const u32 begin = iteration, end = begin + count;
            for (; iteration < end; ++iteration) {
                wait_for(shared.full(iteration), shared.parity(iteration));
                begin_products();
                const u32 weights = shared.weights(iteration) + group * 64 * 128, x = shared.x(iteration);
#pragma unroll
                for (int k = 0; k < 128; k += 32) multiply_add(sum, operand(weights + k, 0), operand(x + k, 0));
                commit_products();
                wait_for_products<1>(sum);
                if (iteration > begin && arrives) arrive(shared.empty(iteration - 1));
            }
            wait_for_products<0>(sum);
            if (iteration > begin && arrives) arrive(shared.empty(iteration - 1));
        };
        for (int tile = 0; tile < work.num_tiles; ++tile) {
            Sums sum;
            sum_spans(sum, work.num_spans);
            const u32 end = iteration;
            if (work.split == 0) {
                wait_for(adapters.listed, 0);
                const Parts parts(work.first_row(tile), n_size, first_end, second_end);
                const u32 last = end + (*adapters.num_steps + STEPS - 1) / STEPS * parts.count;
                for (; iteration < last; ++iteration) {
                    wait_for(shared.full(iteration), shared.parity(iteration));
                    begin_products();
                    const u32 weights = shared.weights(iteration) + group * 64 * 32, x = shared.x(iteration);
#pragma unroll
                    for (int n = 0; n < STEPS; ++n) {
                        const u64 b = narrow_operand(weights + n * STEP_WEIGHTS);
                        multiply_add(sum, b, narrow_operand(x + 2 * n * HALF_STEP));
                        multiply_add(sum, b, narrow_operand(x + (2 * n + 1) * HALF_STEP));
                    }
                    commit_products();
                    wait_for_products<1>(sum);
                    if (iteration > end && arrives) arrive(shared.empty(iteration - 1));
                }
                wait_for_products<0>(sum);
                if (iteration > end && arrives) arrive(shared.empty(iteration - 1));
            }
            const OutputTile output(out, bias, work.first_row(tile), num_rows, n_size);
            store(sum, output, shared, work.split);
        }
        return;
    }
    if (is_producer) {
        u32 iteration = 0, built = 0;
        for (int tile = 0; tile < work.num_tiles; ++tile) {
            const int row = work.first_row(tile);
            for (int span = 0; span < work.num_spans; ++span, ++iteration) {
                if (iteration >= STAGES) wait_for(shared.empty(iteration), shared.parity(iteration) ^ 1);
                if (iteration >= min(AHEAD, work.num_spans)) fetch_weights(iteration, row, work.first_span + span);
                copy_box(shared.x(iteration), x_map, (work.first_span + span) * BOX_ELEMENTS, 0, shared.full(iteration));
            }
            if (work.split != 0) continue;
            wait_for(adapters.listed, 0);
            const u32 num_steps = *adapters.num_steps;
            const Parts parts(row, n_size, first_end, second_end);
            for (int part = parts.first; part < parts.first + parts.count; ++part) {
                const TensorMap& map = part == 0 ? b_map0 : part == 1 ? b_map1 : b_map2;
                const int from = row - (part == 0 ? 0 : part == 1 ? first_end : second_end);
                for (u32 step = 0; step < num_steps; step += STEPS, ++iteration, ++built) {
                    if (iteration >= STAGES) wait_for(shared.empty(iteration), shared.parity(iteration) ^ 1);
                    arrive(adapters.open(built));
                    arrive_expecting(shared.full(iteration), STEPS * STEP_WEIGHTS);
#pragma unroll
                    for (u32 n = 0; n < STEPS; ++n) {
                        const Step one{adapters.steps[min(step + n, num_steps - 1)]};
                        copy_adapter(shared.weights(iteration) + n * STEP_WEIGHTS, map, one.rank_step() * 16, from,
                                     one.slot(), shared.full(iteration), policy);
                    }
                }
            }
        }
    }
    if (is_helper && work.split == 0) {
        const u32 num_steps = *adapters.num_steps;
        u32 iteration = 0, built = 0;
        int rounded = -1;
        for (int tile = 0; tile < work.num_tiles; ++tile) {
            const Parts parts(work.first_row(tile), n_size, first_end, second_end);
            iteration += work.num_spans;
            for (int part = parts.first; part < parts.first + parts.count; ++part) {
                if (part != rounded) {
                    meet_helpers();  // stages with the other part are built
                    round_part(adapters, sums, part, helper_thread);
                    meet_helpers();
                }
                rounded = part;
                for (u32 step = 0; step < num_steps; step += STEPS, ++iteration, ++built) {
                    if (built % HELPERS != helper) continue;
                    wait_for(adapters.open(built), built / STAGES % 2);
                    build_stage(adapters, memory + (shared.x(iteration) - shared_address(memory)), step, num_steps);
                    if (lane == 0) arrive(shared.full(iteration));
                }
            }
        }
    }
    __syncwarp();
    if (SPLIT == 2) wait_for_cluster();
}
