// paged_decode_exact: paged_decode by the plan of plan_exact_rows, for the bits of a batch of one, or plan_drafted_rows.
//
//   as paged_decode, and int num_slots; grid (Hkv * SLICES, stripes): a CTA takes each gridDim.y-th slot
//   reference: NumpyOps.paged_decode_attention; roofline: that of paged_decode
//
// A CTA computes a split for up to MEMBERS rows of a sequence, each up to its own end. The last CTA of a row to arrive
// combines its splits. POLLS, for CTAs that all run at once: the CTA of split r % count combines row r, and polls for
// the others; if it gives up, the last CTA does. FETCH_EARLY: tokens of earlier steps are copied while the previous
// kernel runs, which needs a plan from before it.
#include "attention/decode_rows.cuh"

constexpr int MAX_POLLS = 1 << 12;  // a few ms; never reached while all CTAs run at once
constexpr int ROW_CHUNKS = HEAD_DIM / 4;
constexpr int LANE_SPLITS = ceil_div(MAX_SPLITS, WARP_SIZE);

// ROWS a member. `q`, `out` and `workspace` point to sequence 0 and row 0.
struct MemberRows {
    const T* q;
    T* out;
    WorkspaceRows workspace;
    const PrefixGroupMember* members;
    int first_sequence, num_members, num_rows, num_heads, split_row;
    float value_scale;

    __device__ __forceinline__ bool holds(int row) const { return row / ROWS < num_members && row % ROWS < num_rows; }
    __device__ __forceinline__ i64 first_of(int sequence) const {
        return static_cast<i64>(sequence) * num_heads * HEAD_DIM;
    }
    __device__ __forceinline__ const T* at(int row) const {  // members are adjacent
        return holds(row) ? q + first_of(first_sequence + row / ROWS) + row % ROWS * HEAD_DIM : nullptr;
    }
#if QUIRE_DTYPE != 0
    template <int Q_TILES>
    __device__ __forceinline__ OwnEnds<Q_TILES> ends() const {
        OwnEnds<Q_TILES> found;
#pragma unroll
        for (int n = 0; n < Q_TILES; ++n) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int row = n * 8 + threadIdx.x % 4 * 2 + (ROWS % 2 == 0 ? 0 : j);  // even: one register for both
                found.at[n][j] = members[min(row / ROWS, num_members - 1)].end;
            }
        }
        return found;
    }
#endif
    __device__ __forceinline__ void store(int row, int d, float (&sum)[4], float maximum, float total) const {
        const PrefixGroupMember member = members[row / ROWS];
        if (member.count == 1) {
            OutputRows{out + first_of(member.sequence), ROWS, value_scale}.store(row % ROWS, d, sum, maximum, total);
            return;
        }
        const i64 at = static_cast<i64>(member.first_row + split_row) * num_heads + row % ROWS;
        workspace.store_partial(at, d, sum, maximum, total);
    }
    __device__ __forceinline__ void store_zeros() const {
        const float zeros[4] = {};
        for (int i = threadIdx.x; i < num_rows * (HEAD_DIM / 4); i += THREADS)
            store_four(out + first_of(members[0].sequence) + i * 4, zeros);
    }
};

#if QUIRE_DTYPE == 0

__device__ __forceinline__ void attend_members(const MemberRows& rows, const PagedHead& head, const KvSplit& split,
                                               float scale_log2, unsigned char* shared, bool is_early) {
    Results<ROWS>& results = *reinterpret_cast<Results<ROWS>*>(shared);
    if (is_early) wait_for_previous_kernel();
    for (int m = 0; m < split.num_members; ++m) {
        KvSplit own = split;
        own.end = min(split.end, rows.members[m].end);
        MemberRows row = rows;
        row.members += m;
        row.first_sequence += m;
        row.num_members = 1;
        attend(row.at(0), head, own, scale_log2, results);
        __syncthreads();
        merge_warps(results, row);
        __syncthreads();
    }
}

#else

constexpr int MOST_TILES = ceil_div(GROUP_ROWS, 8);

// A warp's tiles of a split, in its part of the ring.
struct WarpTiles {
    const PagedHead& head;
    const KvSplit& split;
    u32 ring;
    int tile, num_tiles;
    int2 next_ids;

    __device__ __forceinline__ WarpTiles(const PagedHead& head, const KvSplit& split, unsigned char* bytes)
        : head(head), split(split) {
        const int warp = threadIdx.x / WARP_SIZE;
        ring = shared_address(bytes) + warp * (STAGES * 2 * TILE_BYTES);
        tile = split.begin / TILE + warp;
        num_tiles = ceil_div(split.end, TILE);
    }
    __device__ __forceinline__ void copy(u32 stage, int2 ids, int number) const {
        if (number < num_tiles)
            copy_tile(ring + stage * 2 * TILE_BYTES, head, ids, number, split.first, split.end);
        commit_copies();
    }
    // Fills the ring; if `is_early`, with tokens of earlier steps until the previous kernel has ended.
    __device__ __forceinline__ void begin(bool is_early) {
        int2 ids[STAGES];
#pragma unroll
        for (int i = 0; i < STAGES; ++i) ids[i] = blocks_of_tile(head, tile + i * WARPS);
        next_ids = blocks_of_tile(head, tile + STAGES * WARPS);
        bool has_waited = !is_early;
#pragma unroll
        for (int i = 0; i < STAGES; ++i) {
            const int number = tile + i * WARPS;
            if (!has_waited && number < num_tiles && (number + 1) * TILE > split.count) {
                wait_for_previous_kernel();
                has_waited = true;
            }
            copy(i, ids[i], number);
        }
        if (!has_waited) wait_for_previous_kernel();
    }
};

template <int NUM_TILES>
__device__ __forceinline__ void attend_rows(const MemberRows& rows, WarpTiles& tiles, float scale_log2,
                                            unsigned char* shared) {
    u32 queries[NUM_TILES][STEPS][2];
    load_queries(queries, rows);
    ScoreScale<NUM_TILES> scale;
#if SCALES_QUERIES
#pragma unroll
    for (int n = 0; n < NUM_TILES; ++n) scale.by[n][0] = scale.by[n][1] = scale_log2;
    scale_rows(queries, scale);
#else
    scale.by = scale_log2;
#endif
    const auto ends = rows.template ends<NUM_TILES>();
    WarpState<NUM_TILES> state = {};
#pragma unroll
    for (int n = 0; n < NUM_TILES; ++n) state.maximum[n][0] = state.maximum[n][1] = minus_infinity();
    const KvSplit& split = tiles.split;
    u32 stage = 0;
    for (int tile = tiles.tile; tile < tiles.num_tiles; tile += WARPS) {
        wait_for_copies<STAGES - 1>();
        __syncwarp();
        attend_tile(state, queries, tiles.ring + stage * 2 * TILE_BYTES, split.first - tile * TILE,
                    split.end - tile * TILE, ends, tile * TILE, scale);
        __syncwarp();
        const int ahead = tile + STAGES * WARPS;
        tiles.copy(stage, tiles.next_ids, ahead);
        tiles.next_ids = blocks_of_tile(tiles.head, ahead + WARPS);  // ahead, so that the copy does not wait
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    wait_for_copies<0>();
    __syncthreads();
    auto& results = *reinterpret_cast<Results<at_most(GROUP_ROWS, 8 * NUM_TILES)>*>(shared);
    store_state(state, results);
    __syncthreads();
    merge_warps(results, rows);
}

__device__ __forceinline__ void attend_members(const MemberRows& rows, const PagedHead& head, const KvSplit& split,
                                               float scale_log2, unsigned char* shared, bool is_early) {
    WarpTiles tiles(head, split, shared);
    tiles.begin(is_early);
    const int num_tiles = ceil_div(split.num_members * ROWS, 8);
    if (MOST_TILES <= 1 || num_tiles <= 1)
        attend_rows<at_most(MOST_TILES, 1)>(rows, tiles, scale_log2, shared);
    else if (MOST_TILES <= 2 || num_tiles <= 2)
        attend_rows<at_most(MOST_TILES, 2)>(rows, tiles, scale_log2, shared);
    else if (MOST_TILES <= 3 || num_tiles <= 3)
        attend_rows<at_most(MOST_TILES, 3)>(rows, tiles, scale_log2, shared);
    else
        attend_rows<MOST_TILES>(rows, tiles, scale_log2, shared);
}

#endif

__device__ __forceinline__ u32 load_acquire(const u32* from) {
    u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

__device__ __forceinline__ bool combines(const PrefixGroupMember& member, int split_row) {
    return POLLS && member.sequence % member.count == split_row;
}

// Returns whether this CTA, which combines the row, is the last to arrive.
__device__ __forceinline__ bool waits_for_others(u32* counter, u32 count) {
    for (int poll = 0; poll < MAX_POLLS; ++poll) {
        if (load_acquire(counter) != count - 1) continue;
        *counter = 0;
        return true;
    }
    return atomicInc(counter, count - 1) == count - 1;
}

// Weights of a row's splits, shared float[count], as in combine_splits. Called by a warp.
__device__ __forceinline__ void weigh_splits(const float2* stats, int count, int stride, float* weights,
                                             float value_scale) {
    const int lane = threadIdx.x % WARP_SIZE;
    float2 splits[LANE_SPLITS];
    float maximum = minus_infinity(), total = 0.0f;
#pragma unroll
    for (int n = 0; n < LANE_SPLITS; ++n) {
        const int i = lane + n * WARP_SIZE;
        splits[n] = i < count ? __ldcg(stats + static_cast<i64>(i) * stride) : make_float2(minus_infinity(), 0.0f);
    }
#pragma unroll
    for (int n = 0; n < LANE_SPLITS; ++n) maximum = fmaxf(maximum, splits[n].x);
    const float base = finite_base(warp_max(maximum));
#pragma unroll
    for (int n = 0; n < LANE_SPLITS; ++n) {
        splits[n].x = exp2_approx(splits[n].x - base);
        total += splits[n].x * splits[n].y;
    }
    const float scale = reciprocal_or_zero(warp_sum(total)) * value_scale;
#pragma unroll
    for (int n = 0; n < LANE_SPLITS; ++n) {
        const int i = lane + n * WARP_SIZE;
        if (i < count) weights[i] = splits[n].x * scale;
    }
}

// combine_splits of `num` members, whose sums are brought to shared memory at once. `most`: splits of one.
__device__ __forceinline__ void combine_together(const MemberRows& rows, const int* members, int num, int most,
                                                 unsigned char* shared) {
    const int stride = rows.num_heads;
    float* sums = reinterpret_cast<float*>(shared);
    float* weights = sums + num * most * ROWS * HEAD_DIM;
    for (int e = 0; e < num; ++e) {
        const PrefixGroupMember member = rows.members[members[e]];
        const u32 to = shared_address(sums + e * most * ROWS * HEAD_DIM);
        const float* from = rows.workspace.sums + static_cast<i64>(member.first_row) * stride * HEAD_DIM;
        for (int i = threadIdx.x; i < member.count * ROWS * ROW_CHUNKS; i += THREADS) {
            const int split = i / (ROWS * ROW_CHUNKS), at = i % (ROWS * ROW_CHUNKS);
            if (at / ROW_CHUNKS < rows.num_rows)
                copy_async_16(to + i * 16, from + static_cast<i64>(split) * stride * HEAD_DIM + at * 4, true);
        }
    }
    commit_copies();
    for (int i = threadIdx.x / WARP_SIZE; i < num * ROWS; i += WARPS) {
        const PrefixGroupMember member = rows.members[members[i / ROWS]];
        const float2* stats = rows.workspace.stats + static_cast<i64>(member.first_row) * stride + i % ROWS;
        if (i % ROWS < rows.num_rows) weigh_splits(stats, member.count, stride, weights + i * most, rows.value_scale);
    }
    wait_for_copies<0>();
    __syncthreads();
    for (int i = threadIdx.x; i < num * ROWS * ROW_CHUNKS; i += THREADS) {
        const int row = i / ROW_CHUNKS % ROWS, d = i % ROW_CHUNKS * 4, e = i / (ROWS * ROW_CHUNKS);
        if (row >= rows.num_rows) continue;
        const PrefixGroupMember member = rows.members[members[e]];
        const float* from = sums + (e * most * ROWS + row) * HEAD_DIM + d;
        const float* weight = weights + (e * ROWS + row) * most;
        float sum[4] = {};
#pragma unroll 8
        for (int split = 0; split < member.count; ++split) {
            const float4 x = *reinterpret_cast<const float4*>(from + split * ROWS * HEAD_DIM);
            sum[0] += weight[split] * x.x, sum[1] += weight[split] * x.y;
            sum[2] += weight[split] * x.z, sum[3] += weight[split] * x.w;
        }
        store_four(rows.out + rows.first_of(member.sequence) + row * HEAD_DIM + d, sum);
    }
    __syncthreads();
}

// Combines the members whose thread says so.
__device__ __forceinline__ void combine_members(const MemberRows& rows, bool is_complete, unsigned char* shared) {
    __shared__ int members[MEMBERS];
    __shared__ int num, most;
    __threadfence();
    if (threadIdx.x == 0) num = most = 0;
    __syncthreads();
    if (is_complete) {
        members[atomicAdd(&num, 1)] = threadIdx.x;
        atomicMax(&most, rows.members[threadIdx.x].count);
    }
    __syncthreads();
    const int at_once = SHARED_BYTES / (max(most, 1) * ROWS * (HEAD_DIM + 1) * static_cast<int>(sizeof(float)));
    const int num_here = num;
    if (at_once > 0) {
        for (int first = 0; first < num_here; first += at_once)
            combine_together(rows, members + first, min(at_once, num_here - first), most, shared);
        return;
    }
    for (int e = 0; e < num_here; ++e) {
        const PrefixGroupMember member = rows.members[members[e]];
        const i64 row = static_cast<i64>(member.first_row) * rows.num_heads;
        combine_splits(rows.workspace.sums + row * HEAD_DIM, rows.workspace.stats + row, rows.num_rows, member.count,
                       rows.num_heads, reinterpret_cast<float*>(shared), rows.value_scale,
                       rows.out + rows.first_of(member.sequence));
        __syncthreads();  // the weights are read
    }
}

extern "C" __global__ void LAUNCH_BOUNDS
paged_decode_exact(T* __restrict__ out, const T* __restrict__ q, const Kv* __restrict__ kv,
                   const int* __restrict__ block_tables, const KvSplit* __restrict__ splits, float* partial_sums,
                   float2* partial_stats, int num_sequences, int num_blocks, int num_layers, int layer, int max_blocks,
                   float scale_log2, const float* kv_scales, int num_slots) {
    extern __shared__ __align__(1024) unsigned char shared[];
    start_next_kernel();
    if (!FETCH_EARLY) wait_for_previous_kernel();
    const int num_kv_heads = gridDim.x / SLICES, kv_head = blockIdx.x / SLICES, first_row = blockIdx.x % SLICES * ROWS;
    const int num_rows = min(ROWS, GROUP - first_row), num_heads = num_kv_heads * GROUP;
    const int head_row = kv_head * GROUP + first_row;
    const WorkspaceRows workspace{partial_sums + head_row * HEAD_DIM, partial_stats + head_row, num_rows};
    const PrefixGroupMember* members = reinterpret_cast<const PrefixGroupMember*>(splits + num_slots);
    const KvScales scales(kv_scales, layer, num_kv_heads);
    scale_log2 *= scales.key(kv_head);
    const auto rows_of = [&](const KvSplit& split) {
        return MemberRows{q + head_row * HEAD_DIM, out + head_row * HEAD_DIM, workspace, members + split.first_row,
                          split.first_row, split.num_members, num_rows, num_heads, split.row, scales.value(kv_head)};
    };
    const auto counter_of = [&](int sequence) { return &num_arrived[sequence * gridDim.x + blockIdx.x]; };
    bool is_early = FETCH_EARLY;

    for (int slot = blockIdx.y; slot < num_slots; slot += gridDim.y) {
        const KvSplit split = splits[slot];
        if (split.sequence >= num_sequences) break;
        const MemberRows rows = rows_of(split);
        if (split.end <= split.begin) {
            if (is_early) wait_for_previous_kernel();
            is_early = false;
            rows.store_zeros();
            continue;
        }
        const PagedHead head(kv, block_tables + static_cast<i64>(split.sequence) * max_blocks, num_blocks, max_blocks,
                             num_layers, layer, num_kv_heads, kv_head);
        __syncthreads();  // shared memory of the previous slot is free
        attend_members(rows, head, split, scale_log2, shared, is_early);
        is_early = false;
        __threadfence();
        __syncthreads();
        bool is_last = false;
        if (threadIdx.x < split.num_members) {
            const PrefixGroupMember member = rows.members[threadIdx.x];
            if (member.count > 1 && !combines(member, split.row))
                is_last = atomicInc(counter_of(member.sequence), member.count - 1) == member.count - 1;
        }
        if (__syncthreads_or(is_last)) combine_members(rows, is_last, shared);
    }
    if (is_early) wait_for_previous_kernel();
    for (int slot = blockIdx.y; POLLS && slot < num_slots; slot += gridDim.y) {
        const KvSplit split = splits[slot];
        if (split.sequence >= num_sequences) break;
        const MemberRows rows = rows_of(split);
        bool is_complete = false, is_ours = false;
        if (threadIdx.x < split.num_members) {
            const PrefixGroupMember member = rows.members[threadIdx.x];
            is_ours = member.count > 1 && combines(member, split.row);
            if (is_ours) is_complete = waits_for_others(counter_of(member.sequence), member.count);
        }
        if (__syncthreads_or(is_ours)) combine_members(rows, is_complete, shared);
    }
}
