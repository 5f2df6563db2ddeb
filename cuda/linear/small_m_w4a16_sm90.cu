// small_m_w4a16_sm90: out = x @ weight.T + bias with 4-bit weights on Hopper, up to 2,048 rows; bound by unpacking up
// to 64 rows, by wgmma from 256.
//
//   x [M, K] as a 2-D tensor map, boxes of 64 elements x COLS rows, 128-byte swizzle; tiles, scale, zero (or null):
//   int4.cuh; bias [N] or null, out [M, N]; group_spans: as gemv_w4a16; arrays aligned to 16 bytes
//   grid: at most SPLIT blocks per tile; block THREADS
//   reference: NumpyOps.linear
//   roofline: N K / 2 bytes and the scales, or 2 M N K operations; 0.8 of the larger time from 30 MB
//
// Blocks of a cluster split K; each reduces its chunks of 8 rows of x in rank order. The order of sums depends only on
// K and SPLIT: a row has the same bits in any batch.
#include "linear/small_m_w4a16.cuh"

// A ring stage and its span of K.
struct PipelineState {
    const BlockWork& work;
    TilePlace place;
    u32 stage = 0, parity = 0;
    int tile = 0, span;

    __device__ __forceinline__ PipelineState(const BlockWork& work)
        : work(work), place(work, 0), span(work.first_span) {}
    __device__ __forceinline__ bool is_done() const { return tile >= work.num_tiles; }
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
        if (++span == work.first_span + work.num_spans) {
            span = work.first_span;
            place = TilePlace(work, ++tile);
        }
    }
};

// One elected thread, so that no loops surround its copies: its instructions limit narrow tiles.
struct Producer {
    const Shared& shared;
    const BlockWork& work;
    const TensorMap& x_map;
    const u8* tiles;
    const u16* scale;
    const u8* zero;
    int group_spans;
    u64 policy;

    __device__ __forceinline__ void fetch_weights(const PipelineState& state) const {
        const int first = state.place.first_block, blocks = min(BLOCKS, work.num_blocks - first);
        const u32 barrier = shared.full(state.stage);
        arrive_expecting(barrier, X_BYTES + blocks * (SPAN_BYTES + GROUPS * (SCALE_BYTES + ZERO_BYTES)));
        const i64 piece = static_cast<i64>(state.span) * work.num_blocks + first;
        copy_bytes(shared.weights(state.stage), tiles + piece * SPAN_BYTES, blocks * SPAN_BYTES, barrier, policy);
#pragma unroll
        for (int i = 0; i < GROUPS; ++i) {
            const int group = GROUPS > 1         ? state.span * GROUPS + i
                              : group_spans == 1 ? state.span
                                                 : state.span / group_spans;
            const i64 from = (static_cast<i64>(group) * work.num_blocks + first) * BLOCK_ROWS;
            copy_bytes(shared.scales(state.stage) + i * BLOCKS * SCALE_BYTES, scale + from, blocks * SCALE_BYTES, barrier,
                       policy);
            if (ZEROS)
                copy_bytes(shared.zeros(state.stage) + i * BLOCKS * ZERO_BYTES, zero + from, blocks * ZERO_BYTES, barrier,
                           policy);
        }
    }
    __device__ __forceinline__ void fetch_x(const PipelineState& state) const {
        const u32 to = shared.x(state.stage), barrier = shared.full(state.stage);
        copy_box(to, x_map, state.span * SPAN, state.place.first_col, barrier);
        copy_box(to + BOX_BYTES, x_map, state.span * SPAN + SPAN / 2, state.place.first_col, barrier);
    }
    __device__ __forceinline__ void fetch_ahead() const {
        PipelineState state(work);
#pragma unroll 1
        for (int i = 0; i < AHEAD && !state.is_done(); ++i) {
            fetch_weights(state);
            state.advance();
        }
    }
    __device__ __forceinline__ void fetch_all() const {
        PipelineState state(work);
#pragma unroll 1
        for (int i = 0; !state.is_done(); ++i) {
            wait_for(shared.empty(state.stage), state.parity ^ 1);
            if (i >= AHEAD) fetch_weights(state);
            fetch_x(state);
            state.advance();
        }
    }
};

// No release (it takes 1 us): values read from shared memory are in use by now.
__device__ __forceinline__ void sync_cluster() {
    arrive_at_cluster();
    wait_for_cluster();
}

// Sends other blocks their chunks and stores its own, SPLIT i + rank. Sums arrive in the rings, which all blocks have
// read, and are added in rank order.
__device__ __forceinline__ void store_own(const Sums& sum, const OutputTile& output, const Shared& shared, int rank) {
    const u32 base = shared.base + threadIdx.x * 16;
    constexpr int PLACE_BYTES = CONSUMERS * OWN_CHUNKS * 16;
#pragma unroll
    for (int other = 0; other < SPLIT; ++other) {
        if (other == rank) continue;
        const int place = rank < other ? rank : rank - 1;
        const u32 theirs = address_in(other, base + place * PLACE_BYTES);
        const u32 barrier = address_in(other, shared.all_sent());
#pragma unroll
        for (int i = 0; i < OWN_CHUNKS; ++i) {
            const int at = 4 * (SPLIT * i + other);
            const float four[4] = {sum[at], sum[at + 1], sum[at + 2], sum[at + 3]};
            send(theirs + i * CONSUMERS * 16, four, barrier);
        }
    }
    wait_for_sent(shared.all_sent(), 0);
#pragma unroll
    for (int i = 0; i < OWN_CHUNKS; ++i) {
        float total[4] = {};
#pragma unroll
        for (int source = 0; source < SPLIT; ++source) {
            float four[4];
            if (source == rank) {
#pragma unroll
                for (int own = 0; own < SPLIT; ++own) {
                    if (own != rank) continue;
#pragma unroll
                    for (int c = 0; c < 4; ++c) four[c] = sum[4 * (SPLIT * i + own) + c];
                }
            } else {
                receive(four, base + (source < rank ? source : source - 1) * PLACE_BYTES + i * CONSUMERS * 16);
            }
#pragma unroll
            for (int c = 0; c < 4; ++c) total[c] += four[c];
        }
        output.store(SPLIT * i + rank, total);
    }
}

extern "C" __global__ void
#if SPLIT > 1
__cluster_dims__(SPLIT, 1, 1)
#endif
__launch_bounds__(THREADS, 1)
small_m_w4a16_sm90(const __grid_constant__ TensorMap x_map, const u8* tiles, const u16* scale, const u8* zero,
                    const T* bias, Out* out, int num_rows, int n_size, int k_size, int group_spans) {
    extern __shared__ unsigned char memory[];
    const Shared shared{(shared_address(memory) + 1023) / 1024 * 1024};
    const BlockWork work(n_size, k_size, num_rows);
    const u64 policy = work.col_tiles == 1 ? policy_of_read_once() : policy_of_read_again();
    const Producer producer{shared, work, x_map, tiles, scale, zero, group_spans, policy};

    const bool is_producer = __shfl_sync(FULL_WARP, threadIdx.x / WARP_SIZE, 0) == CONSUMERS / WARP_SIZE;

    start_next_kernel();
    if (is_producer && is_elected()) {
        prefetch_map(x_map);
        make_ring_barriers(shared, CONSUMERS / WARP_SIZE);
        make_barrier(shared.all_sent(), 1);
        publish_barriers();
        if (SPLIT > 1) arrive_expecting(shared.all_sent(), SENT_BYTES);
        producer.fetch_ahead();
    }
    __syncthreads();
    wait_for_previous_kernel();
    if (threadIdx.x >= CONSUMERS) {
        give_up_registers<PRODUCER_REGISTERS>();
        if (is_producer && is_elected()) producer.fetch_all();
        __syncwarp();
        if (SPLIT > 1) sync_cluster();
    } else {
        take_registers<CONSUMER_REGISTERS>();
        for (int tile = 0; tile < work.num_tiles; ++tile) {
            Sums sum;
            sum_tile(sum, shared, work, tile * work.num_spans);
            const TilePlace place(work, tile);
            const OutputTile output(out + static_cast<i64>(place.first_col) * n_size, bias, place.first_block,
                                    num_rows - place.first_col, n_size);
            if (SPLIT > 1) {
                sync_cluster();
                store_own(sum, output, shared, work.split);
            } else {
                store_all(sum, output);
            }
        }
    }
}
