// adapted_product_sm90: out = x @ weight.T + bias + LoRA deltas of the rows, rounded once.
//
//   x, weight, bias, out, grid, reference of the product: as in small_m_sm90, or with WEIGHT_FP8, x_scale and
//   weight_scale as in small_m_fp8_sm90; block ADAPTED_THREADS
//   rows int32 [M], tiles int32 [G, 3] of at most 16 rows, ranks int32 [S]: as in lora_shrink
//   a [S, P, R, K], b [S, N, R]: finite, b zero beyond the rank; R = 16 RANK_STEPS, M <= COLS, G <= 9/8 M; parts end at
//   first_end, second_end, N, multiples of 8
//   a_map: 2-D map of a, boxes of 64 x unit_outputs in the 128-byte swizzle; unit_outputs divides P R
//   shrunk u64 [ROOM_WORDS], at least 4 M P R; left u32 [2]: blocks that have left, last tag; both zero at first
//   num_pieces: pieces of A in a helper's ring
//   reference: NumpyOps.linear, lora_shrink, lora_expand
//   roofline: as small_m_sm90, plus A and B of each adapter of the step read once, R (P K + N) elements
//
// Helper warps compute adapters while the others run the GEMM. All blocks' helpers share the units of x @ A and store
// each sum in a word with the launch's tag, so that blocks wait for it without a fence; each block's helpers then leave
// the deltas of its tile in shared memory. All blocks run at once, one per SM. A row has one adapter and a fixed order
// of sums: no result depends on the batch. Where two blocks split K, each adds deltas to the rows of x that it stores.
// Helpers run code once: 75 KB of it took 3 us per layer more than 48 KB.
#if WEIGHT_FP8
#define WEIGHT_ELEMENTS 128
#else
#define WEIGHT_ELEMENTS 64
#endif
#define X_BOXES 1
#define OUT_FLOAT 0
#define ADDED_ROWS (COLS / SPLIT)
#define ADDED_STRIDE ((ROWS + 15) / 16 * 16 + 4)
#define COMPACT_BYTES (COLS * RANK_STEPS * 64)
#define PARTS_AT_ONCE (COLS * RANK_STEPS > 256 ? 1 : 2)
#define MAX_RING_PIECES 6
#define BARRIERS_BYTES (32 + 8 * 2 * 8 * MAX_RING_PIECES)
#define ADDED_BYTES (4 * ADDED_ROWS * ADDED_STRIDE)
#define LIST_BYTES ((WEIGHT_FP8 ? 24 : 20) * COLS)
#define SCALE_BYTES (BARRIERS_BYTES + PARTS_AT_ONCE * COMPACT_BYTES + ADDED_BYTES + LIST_BYTES + 1024 + RINGS_BYTES)
#include "adapters/adapted_expand.cuh"
#include "adapters/adapted_shrink.cuh"

constexpr int ADAPTED_THREADS = CONSUMERS + WARP_SIZE + HELPER_THREADS;
static_assert(ADAPTED_THREADS == 416, "the launcher's threads are not these");

struct Stage {
    static __device__ __forceinline__ void multiply(Sums& sum, u32 weights, u32 x) {
#pragma unroll
        for (int k = 0; k < 128; k += 32) {
#if WEIGHT_FP8
            multiply_add_e4m3(sum, operand(weights + k, 0), operand(x + k, 0));
#else
            multiply_add(sum, operand(weights + k, 0), operand(x + k, 0));
#endif
        }
    }
};

// A warp's output rows; bias and scale of this thread's two.
struct OutputTile {
    const Adapters& adapters;
    Out* out;
    int first, end;  // weight rows of this warp
    int tile_row, parity, num_rows, n_size;
    float bias[2], scale[2];

    __device__ __forceinline__ OutputTile(const Adapters& adapters, Out* out, const T* add, const float* weight_scale,
                                          int tile_row, int parity, int num_rows, int n_size)
        : adapters(adapters),
          out(out),
          end(min(tile_row + ROWS, n_size)),
          tile_row(tile_row),
          parity(parity),
          num_rows(num_rows),
          n_size(n_size) {
        first = tile_row + threadIdx.x / WARP_SIZE * 16;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = first + 8 * half + threadIdx.x % WARP_SIZE / 4;
            bias[half] = add != nullptr && row < end ? to_float(add[row]) : 0.0f;
            if (WEIGHT_FP8) scale[half] = row < end ? __ldg(weight_scale + row) : 0.0f;
        }
    }

    // Stores rows 8 chunk .. 8 chunk + 7 of x, transposed for adjacent stores; N is even.
    __device__ __forceinline__ void store(int chunk, const float (&four)[4]) const {
        const int g = threadIdx.x % WARP_SIZE / 4, t = threadIdx.x % 4;
        wait_for(adapters.ready, parity);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float low = four[2 * half], high = four[2 * half + 1];
            if (WEIGHT_FP8) {
                low *= scale[half] * adapters.x_scales[8 * chunk + 2 * t];
                high *= scale[half] * adapters.x_scales[8 * chunk + 2 * t + 1];
            }
            low += bias[half];
            high += bias[half];
            if (first + 8 * half + g < end) {
                const int row = first + 8 * half + g - tile_row;
                low += adapters.row(8 * chunk + 2 * t)[row];
                high += adapters.row(8 * chunk + 2 * t + 1)[row];
            }
            const u32 pair = transpose_matrix(pack_pair(low, high));
            const int m = 8 * chunk + g, n = first + 8 * half + 2 * t;
            if (m < num_rows && n < end) *reinterpret_cast<u32*>(out + static_cast<i64>(m) * n_size + n) = pair;
        }
    }
};

// Limits registers so that a block of add_rms_norm (512 threads of 56 registers) can start while this runs.
extern "C" __global__ void SMALL_M_CLUSTER __maxnreg__(80)
    adapted_product_sm90(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap weight_map,
                         const __grid_constant__ TensorMap a_map, const X* x, const float* x_scale, const T* b,
                         const float* weight_scale, const T* bias, Out* out, u64* shrunk, const int* rows,
                         const int* tiles, const int* ranks, u32* left, int num_rows,
                         int n_size, int k_size, int num_passes, int num_pieces, int num_sorted, int num_tiles,
                         int num_slots, int num_parts, int max_rank, int first_end, int second_end, int unit_outputs) {
    extern __shared__ unsigned char memory[];
    const Shared shared{(shared_address(memory) + 1023) / 1024 * 1024};
    const BlockWork work(n_size, k_size);
    const Adapters adapters(shared, memory);
    const Producer producer{shared, work, weight_map, x_map, policy_of_read_once()};
    const bool is_producer = threadIdx.x == CONSUMERS;
    const int helper_thread = threadIdx.x - CONSUMERS - WARP_SIZE, helper = helper_thread / WARP_SIZE;
    const int lane = threadIdx.x % WARP_SIZE;

    start_next_kernel();
    if (is_producer) {
        prefetch_map(weight_map);
        prefetch_map(x_map);
        prefetch_map(a_map);
        make_ring_barriers(shared, CONSUMERS / WARP_SIZE);
        make_barrier(shared.all_sent(), 1);
        make_barrier(adapters.ready, HELPERS);
        make_barrier(adapters.taken, CONSUMERS / WARP_SIZE);
        publish_barriers();
        if (SPLIT == 2) arrive_expecting(shared.all_sent(), SENT_BYTES);
        producer.fetch_ahead();
    }
    u32 tag = 0;
    if (helper_thread >= 0) {
        tag = load_relaxed(left + 1) + 1;
        if (helper_thread < 2 * HELPERS * MAX_PIECES) make_barrier(adapters.a_full(0, helper_thread), 1);
        publish_barriers();
        load_batch(adapters, rows, tiles, ranks, num_sorted, num_tiles, num_slots, helper_thread);
        meet_helpers();
        if (helper == 0) {
            list_groups(adapters, ranks, num_tiles);
        } else {
#pragma unroll 1
            for (int at = 8 * (helper_thread - WARP_SIZE); at < ADDED_BYTES; at += 8 * (HELPER_THREADS - WARP_SIZE))
                *reinterpret_cast<float2*>(adapters.added + at / 4) = float2{};
        }
    }
    __syncthreads();
    if (SPLIT == 2) arrive_at_cluster();

    if (threadIdx.x < CONSUMERS) {
        for (int tile = 0; tile < work.num_tiles; ++tile) {
            Sums sum;
            sum_tile<Stage>(sum, shared, work, tile * work.num_spans);
            const OutputTile output(adapters, out, bias, weight_scale, work.first_row(tile), tile % 2, num_rows,
                                    n_size);
            store(sum, output, shared, work.split);
            __syncwarp();
            if (lane == 0) arrive(adapters.taken);
        }
        return;
    }
    if (is_producer) {
        wait_for_previous_kernel();
        producer.fetch_all();
    }
    if (helper_thread >= 0) {
        const Parts parts{first_end, second_end, n_size};
        const Shrunk sums{shrunk, tag, num_sorted, num_parts, max_rank};
        const B all_b{b, n_size, max_rank};
        const int num_units = *adapters.num_groups * SPLITS * num_passes;
        APieces a(adapters, a_map, helper, unit_outputs, num_parts * max_rank, num_pieces);
        int number = blockIdx.x;
        ShrinkUnit unit(adapters, number, num_passes, unit_outputs, k_size, helper);
        if (lane == 0 && number < num_units) a.fetch_first(unit);
        __syncwarp();
        if (helper == 0) list_columns(adapters, work.split);
        meet_helpers();
        BPieces ahead(adapters, all_b, parts, helper), now(adapters, all_b, parts, helper);
        wait_for_previous_kernel();
        if (WEIGHT_FP8 && helper_thread < COLS)
            adapters.x_scales[helper_thread] = helper_thread < num_rows ? x_scale[helper_thread] : 0.0f;
        while (number < num_units) {
            const int row = lane / 4 < unit.group.num_rows() ? adapters.sorted_rows[unit.group.first() + lane / 4] : 0;
            sum_unit(reinterpret_cast<float*>(adapters.ring_memory + helper * RING_BYTES), a, unit,
                     x + static_cast<i64>(row) * k_size, k_size);
            meet_helpers();
            store_unit(adapters, a, unit, sums, x_scale, helper_thread);
            meet_helpers();
            number += gridDim.x;
            if (number >= num_units) break;
            unit = ShrinkUnit(adapters, number, num_passes, unit_outputs, k_size, helper);
            if (lane == 0) a.fetch_first(unit);
            __syncwarp();
        }

        for (int tile = 0; tile < work.num_tiles; ++tile) {
            const int row = work.first_row(tile), first = parts.first(row), end = first + parts.num_parts(row);
            if (tile > 0) wait_for(adapters.taken, (tile - 1) % 2);
            for (int part = first; part < end; part += PARTS_AT_ONCE) {
                const int num_now = min(PARTS_AT_ONCE, end - part);
                ahead.start(row, part, num_now);
                now.start(row, part, num_now);
                ahead.fetch_first();
                if (tile > 0 || part > first) meet_helpers();  // the previous operands have been read
                round_parts(adapters, sums, part, num_now, helper_thread);
                meet_helpers();
                expand(adapters, now, ahead, row, part);
            }
            __syncwarp();
            if (lane == 0) arrive(adapters.ready);
        }
        if (helper_thread == 0) leave(left, sums);
    }
    __syncwarp();
    if (SPLIT == 2) wait_for_cluster();
}
