// Paged decode attention: one query row a sequence and head against the cached keys and values. Split-KV flash
// decoding.
//
// q, out [S, Hq, HEAD_DIM]; kv [num_blocks, L, 2, Hkv, BLOCK_SIZE, HEAD_DIM]; block_tables int32[S, max_blocks];
// parts Part[num_slots] and the members of groups behind them, as plan_decode makes them. Reference:
// NumpyOps.paged_decode_attention. Grid (Hkv * SLICES, num_slots), THREADS threads, SHARED_BYTES of dynamic shared
// memory. Each CTA takes one kv head's ROWS query rows and the part of a sequence that its slot stands for
// (decode_parts.cuh), or those rows of all sequences of a group and a part that they have in common; slots behind the
// last part exit at once. A sequence of one part goes straight to out. Otherwise the parts leave (sum, maximum, total)
// in the workspace and the last to arrive combines them: no second kernel.
//
// fp16, bf16: every warp streams tiles of 16 tokens of its own through its own STAGES of shared memory (cp.async
// through the block table), with no barrier wider than a warp in the loop. Tokens are the M of the product, the packed
// query rows its N: S^T = K Q^T, O^T = V^T P^T, so eight query rows cost one instruction and fragments of P are one
// movmatrix away. fp32: CUDA cores, a query row a CTA (ROWS 1), for tests and small models.
//
// Preconditions: 16-byte aligned arrays; max_blocks > 0; scale > 0; window > 0; one launch at a time on a device (the
// counters of `arrived` are shared by all); no sequence in several parts where S * gridDim.x is above MAX_PAIRS. Rows
// with context_len <= 0 get zeros and read nothing; block ids outside the pool read as zeros. Workspace, only touched
// by sequences of several parts: partial_sums float[num_rows, Hq, HEAD_DIM], partial_stats float2[num_rows, Hq].
// Roofline: bytes of the visible keys and values over memory bandwidth; 0.90 of the device's copy rate from 256 MB up.
#include "attention/attention.cuh"
#include "attention/decode_parts.cuh"
#include "attention/decode_tiles.cuh"
#include "common/mma.cuh"
#include "attention/split_kv.cuh"
#include "common/types.cuh"

// The query rows of one sequence and kv head.
struct RowsOfOne {
    const T* q;
    int num_rows;

    __device__ __forceinline__ const T* at(int row) const { return row < num_rows ? q + row * HEAD_DIM : nullptr; }
};

// Those of a group, ROWS a member, and where their results go. `q` and the workspace are those of sequence 0 and row 0.
struct RowsOfGroup {
    const T* q;
    InWorkspace workspace;
    const Member* members;
    int num_members, num_rows, num_heads, part_row;

    __device__ __forceinline__ bool holds(int row) const { return row / ROWS < num_members && row % ROWS < num_rows; }
    __device__ __forceinline__ const T* at(int row) const {
        if (!holds(row)) return nullptr;
        return q + (static_cast<i64>(members[row / ROWS].sequence) * num_heads + row % ROWS) * HEAD_DIM;
    }
    __device__ __forceinline__ void take(int row, int d, const float (&sum)[4], float maximum, float total) const {
        const i64 at = static_cast<i64>(members[row / ROWS].first_row + part_row) * num_heads + row % ROWS;
        workspace.leave(at, d, sum, maximum, total);
    }
};

#if QUIRE_DTYPE == 0

__device__ __forceinline__ void attend(const T* q, const PagedHead& head, const Part& part, float scale_log2,
                                       Results<ROWS>& results) {
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    RowState state;
    attend_row(state, q, head, max(part.first, part.begin) + warp * WARP_SIZE, part.end, THREADS, scale_log2);
#pragma unroll
    for (int i = 0; i < RowState::DIMS; ++i) {
        const int d = lane + i * WARP_SIZE;
        if (d < HEAD_DIM) results.sum[warp][0][d] = state.sum[i];
    }
    if (lane == 0) results.stats[warp][0] = make_float2(state.maximum, state.total);
}

#else

// Leaves a warp's state in `results`, whose memory no warp may still read tiles from.
template <int Q_TILES, int NUM_ROWS>
__device__ __forceinline__ void leave_state(const WarpState<Q_TILES>& state, Results<NUM_ROWS>& results) {
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
#pragma unroll
    for (int n = 0; n < Q_TILES; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int row = n * 8 + lane % 4 * 2 + j;
            float total = state.total[n][j];
#pragma unroll
            for (int offset = 4; offset < WARP_SIZE; offset *= 2) total += __shfl_xor_sync(FULL_WARP, total, offset);
            if (row >= NUM_ROWS) continue;
            if (lane < 4) results.stats[warp][row] = make_float2(state.maximum[n][j], total);
#pragma unroll
            for (int m = 0; m < STEPS; ++m) {
                results.sum[warp][row][m * 16 + lane / 4] = state.sum[n][m][j];
                results.sum[warp][row][m * 16 + lane / 4 + 8] = state.sum[n][m][j + 2];
            }
        }
    }
}

template <int NUM_ROWS, typename Rows>
__device__ __forceinline__ void attend(const Rows& rows, const PagedHead& head, const Part& part, float scale_log2,
                                       Results<NUM_ROWS>& results, unsigned char* tiles) {
    constexpr int Q_TILES = ceil_div(NUM_ROWS, 8);
    const int warp = threadIdx.x / WARP_SIZE;
    const int num_tiles = ceil_div(part.end, TILE);
    const u32 ring = shared_address(tiles) + warp * (STAGES * 2 * TILE_BYTES);
    int tile = part.begin / TILE + warp;
    int2 ids[STAGES];
#pragma unroll
    for (int i = 0; i < STAGES; ++i) ids[i] = blocks_of_tile(head, tile + i * WARPS);
    int2 next_ids = blocks_of_tile(head, tile + STAGES * WARPS);
#pragma unroll
    for (int i = 0; i < STAGES; ++i) {
        const int ahead = tile + i * WARPS;
        if (ahead < num_tiles) copy_tile(ring + i * 2 * TILE_BYTES, head, ids[i], ahead, part.first, part.end);
        commit_copies();
    }
    u32 fragments[Q_TILES][STEPS][2];
    load_queries(fragments, rows);
    WarpState<Q_TILES> state = {};
#pragma unroll
    for (int n = 0; n < Q_TILES; ++n) state.maximum[n][0] = state.maximum[n][1] = minus_infinity();

    for (u32 stage = 0; tile < num_tiles; tile += WARPS) {
        const u32 at = ring + stage * 2 * TILE_BYTES;
        wait_for_copies<STAGES - 1>();
        __syncwarp();
        attend_tile(state, fragments, at, part.first - tile * TILE, part.end - tile * TILE, scale_log2);
        __syncwarp();
        const int ahead = tile + STAGES * WARPS;
        if (ahead < num_tiles) copy_tile(at, head, next_ids, ahead, part.first, part.end);
        commit_copies();
        next_ids = blocks_of_tile(head, ahead + WARPS);  // a step early: the copy must not wait for it
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    wait_for_copies<0>();
    __syncthreads();
    leave_state(state, results);
}

#endif

// The results of a group's rows for one part that its members have in common go to the workspace; `shared` is all
// dynamic shared memory.
__device__ __forceinline__ void attend_group(const RowsOfGroup& rows, const PagedHead& head, const Part& part,
                                             float scale_log2, unsigned char* shared) {
#if QUIRE_DTYPE == 0
    Results<ROWS>& results = *reinterpret_cast<Results<ROWS>*>(shared);
    for (int m = 0; m < part.num_members; ++m) {
        attend(rows.at(m * ROWS), head, part, scale_log2, results);
        __syncthreads();
        const i64 row = static_cast<i64>(rows.members[m].first_row + rows.part_row) * rows.num_heads;
        merge_warps(results, InWorkspace{rows.workspace.sums + row * HEAD_DIM, rows.workspace.stats + row, ROWS});
        __syncthreads();
    }
#else
    Results<GROUP_ROWS>& results = *reinterpret_cast<Results<GROUP_ROWS>*>(shared);
    attend(rows, head, part, scale_log2, results, shared);
    __syncthreads();
    merge_warps(results, rows);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS)
paged_decode(T* __restrict__ out, const T* __restrict__ q, const T* __restrict__ kv,
                       const int* __restrict__ block_tables, const Part* __restrict__ parts, float* partial_sums,
                       float2* partial_stats, int num_sequences, int num_blocks, int num_layers, int layer,
                       int max_blocks, float scale_log2) {
    extern __shared__ __align__(1024) unsigned char shared[];
    start_next_kernel();
    wait_for_previous_kernel();
    const int num_kv_heads = gridDim.x / SLICES, num_slots = gridDim.y;
    const Part part = parts[blockIdx.y];
    if (part.sequence >= num_sequences) return;
    const int kv_head = blockIdx.x / SLICES, first_row = blockIdx.x % SLICES * ROWS;
    const int num_rows = min(ROWS, GROUP - first_row), num_heads = num_kv_heads * GROUP;
    const int head_row = kv_head * GROUP + first_row;
    const PagedHead head(kv, block_tables + static_cast<i64>(part.sequence) * max_blocks, num_blocks, max_blocks,
                         num_layers, layer, num_kv_heads, kv_head);
    const InWorkspace workspace{partial_sums + head_row * HEAD_DIM, partial_stats + head_row, num_rows};
    out += head_row * HEAD_DIM;
    q += head_row * HEAD_DIM;
    const auto combine = [&](int sequence, int first, int count) {
        const i64 row = static_cast<i64>(first) * num_heads;
        combine_parts(workspace.sums + row * HEAD_DIM, workspace.stats + row, num_rows, count, num_heads,
                      reinterpret_cast<float*>(shared), out + static_cast<i64>(sequence) * num_heads * HEAD_DIM);
    };

    if (part.num_members > 0) {
        const Member* members = reinterpret_cast<const Member*>(parts + num_slots) + part.first_row;
        const RowsOfGroup rows{q, workspace, members, part.num_members, num_rows, num_heads, part.row};
        attend_group(rows, head, part, scale_log2, shared);
        const bool completes_mine = completes_member(members, part.num_members);
        for (int m = 0; m < part.num_members; ++m) {  // meeting, so that weights do not take the place of used ones
            if (__syncthreads_or(completes_mine && threadIdx.x == m))
                combine(members[m].sequence, members[m].first_row, members[m].count);
        }
        return;
    }
    const i64 row = static_cast<i64>(part.sequence) * num_heads;
    const InOutput output{out + row * HEAD_DIM, num_rows};
    if (part.end <= part.begin) {
        const float zeros[4] = {};
        for (int i = threadIdx.x; i < num_rows * (HEAD_DIM / 4); i += THREADS) store_four(output.out + i * 4, zeros);
        return;
    }
    Results<ROWS>& results = *reinterpret_cast<Results<ROWS>*>(shared);
#if QUIRE_DTYPE == 0
    attend(q + row * HEAD_DIM, head, part, scale_log2, results);
#else
    attend(RowsOfOne{q + row * HEAD_DIM, num_rows}, head, part, scale_log2, results, shared);
#endif
    __syncthreads();
    if (part.count == 1) {
        merge_warps(results, output);
        return;
    }
    const i64 mine = static_cast<i64>(part.row) * num_heads;
    merge_warps(results, InWorkspace{workspace.sums + mine * HEAD_DIM, workspace.stats + mine, num_rows});
    if (is_last_to_arrive(part.sequence * gridDim.x + blockIdx.x, part.count))
        combine(part.sequence, part.first_row, part.count);
}
