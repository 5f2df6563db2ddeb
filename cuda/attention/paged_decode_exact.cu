// paged_decode_exact: paged_decode for the plans of plan_exact_rows (the bits of a batch of one) and plan_drafted_rows.
//
//   as paged_decode, and int num_slots; grid (Hkv * SLICES, stripes): a CTA takes every gridDim.y-th slot
//   reference: NumpyOps.paged_decode_attention; roofline: that of paged_decode
//
// A CTA computes a split for up to MEMBERS rows of a sequence, each up to its own end; the same split for the next
// group reuses tiles in KEPT_STAGES of shared memory. A row's last CTA to arrive combines its splits.
// POLLS (all CTAs resident): each warp combines a query head and polls for other splits; if it gives up, the last CTA
// to arrive combines them.
// FETCH_EARLY: copies tokens of earlier steps while the previous kernel runs; the plan must be older than that kernel.
#include "attention/decode_rows.cuh"

constexpr int MAX_POLLS = 1 << 12;  // a few ms; never reached while all CTAs are resident
constexpr int ROW_CHUNKS = HEAD_DIM / 4;
constexpr int LANE_SPLITS = ceil_div(MAX_SPLITS, WARP_SIZE);
constexpr int NUM_COUNTERS = POLLS ? ROWS : 1;  // per row and CTA column
constexpr int LIST_INTS = 64;  // for combine_parts, at the end of shared memory
static_assert(GROUP_ROWS <= WARP_SIZE, "a lane for each query row");
static_assert(KEPT_STAGES == 0 || HEAD_DIM % 32 == 0, "sum_place permutes 32 dimensions");
static_assert(SHARED_BYTES >= WARPS * MAX_SPLITS * sizeof(float), "the weights of the splits must fit");

// ROWS query rows per member. `q` and `out` point to sequence 0, `workspace` to row 0.
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
                const int row = n * 8 + threadIdx.x % 4 * 2 + (ROWS % 2 == 0 ? 0 : j);  // even ROWS: one register
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
                                               float scale_log2, unsigned char* shared, bool is_early, bool) {
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
constexpr int STAGE_BYTES = WARPS * 2 * TILE_BYTES;
static_assert(SHARED_BYTES >= KEPT_STAGES * STAGE_BYTES + sizeof(Results<GROUP_ROWS>), "tiles and results must fit");

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
        ring = shared_address(bytes) + warp * (2 * TILE_BYTES);
        tile = split.begin / TILE + warp;
        num_tiles = ceil_div(split.end, TILE);
    }
    __device__ __forceinline__ void copy(u32 stage, int2 ids, int number) const {
        if (number < num_tiles)
            copy_tile(ring + stage * STAGE_BYTES, head, ids, number, split.first, split.end);
        commit_copies();
    }
    // Fills the ring. If `is_early`, waits for the previous kernel only before tokens that may be of this step.
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
        attend_tile(state, queries, tiles.ring + stage * STAGE_BYTES, split.first - tile * TILE,
                    split.end - tile * TILE, ends, tile * TILE, scale);
        __syncwarp();
        const int ahead = tile + STAGES * WARPS;
        tiles.copy(stage, tiles.next_ids, ahead);
        tiles.next_ids = blocks_of_tile(tiles.head, ahead + WARPS);  // early: the copy must not wait
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    wait_for_copies<0>();
    __syncthreads();
    auto& results =
        *reinterpret_cast<Results<at_most(GROUP_ROWS, 8 * NUM_TILES)>*>(shared + KEPT_STAGES * STAGE_BYTES);
    store_state(state, results);
    __syncthreads();
    merge_warps(results, rows);
}

__device__ __forceinline__ void attend_members(const MemberRows& rows, const PagedHead& head, const KvSplit& split,
                                               float scale_log2, unsigned char* shared, bool is_early,
                                               bool is_held) {
    WarpTiles tiles(head, split, shared);
    if (!is_held) tiles.begin(is_early);
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

// After a CTA barrier this releases the stores of all its threads.
__device__ __forceinline__ bool arrives_last(u32* counter, u32 count) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(counter), "r"(count - 1)
                 : "memory");
    return before == count - 1;
}

// Query rows combined together: with POLLS one per lane, else all of a member by its first lane.
struct Part {
    PrefixGroupMember member = {};
    int head = 0, num_rows = 0;  // 0: none

    __device__ __forceinline__ Part(const MemberRows& rows, int lane) {
        if (lane >= rows.num_members * ROWS) return;
        member = rows.members[lane / ROWS];
        head = lane % ROWS;
        if (member.count <= 1 || head >= (POLLS ? rows.num_rows : 1)) return;
        num_rows = POLLS ? 1 : rows.num_rows;
    }
    // Rows are dealt round-robin to the CTAs of a member's splits, then to their warps.
    __device__ __forceinline__ int number() const { return member.sequence * ROWS + head; }
    __device__ __forceinline__ bool is_for(int split_row) const {
        return POLLS && num_rows > 0 && number() % member.count == split_row;
    }
    __device__ __forceinline__ bool is_for_warp(int split_row) const {
        return is_for(split_row) && number() / member.count % WARPS == static_cast<int>(threadIdx.x) / WARP_SIZE;
    }
    __device__ __forceinline__ u32* counter() const {
        return &num_arrived[(member.sequence * gridDim.x + blockIdx.x) * NUM_COUNTERS + head];
    }
    __device__ __forceinline__ bool arrives_last() const { return ::arrives_last(counter(), member.count); }

    // Polls for the other splits; gives up by arriving. Returns whether this CTA, which combines the part, is the last.
    __device__ __forceinline__ bool waits_for_others() const {
#pragma unroll 1
        for (int poll = 0; poll < MAX_POLLS; ++poll) {
            if (load_acquire(counter()) != static_cast<u32>(member.count) - 1) continue;
            *counter() = 0;
            return true;
        }
        return arrives_last();
    }
};

// Stores the weights of a row's splits in shared float[count], as combine_splits does. Called by a warp.
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

// combine_splits of `num` rows with their sums in shared memory. `most`: most splits of a row.
__device__ __forceinline__ void combine_together(const MemberRows& rows, const int* numbers, int num, int most,
                                                 unsigned char* shared) {
    const int stride = rows.num_heads;
    float* sums = reinterpret_cast<float*>(shared);
    float* weights = sums + num * most * HEAD_DIM;
    const auto first_of = [&](int number) {
        return static_cast<i64>(rows.members[number / ROWS].first_row) * stride + number % ROWS;
    };
    for (int i = threadIdx.x; i < num * most * ROW_CHUNKS; i += THREADS) {
        const int split = i / ROW_CHUNKS % most, number = numbers[i / ROW_CHUNKS / most];
        if (split >= rows.members[number / ROWS].count) continue;
        const i64 from = (first_of(number) + static_cast<i64>(split) * stride) * HEAD_DIM + i % ROW_CHUNKS * 4;
        copy_async_16(shared_address(sums) + i * 16, rows.workspace.sums + from, true);
    }
    commit_copies();
    for (int e = threadIdx.x / WARP_SIZE; e < num; e += WARPS)
        weigh_splits(rows.workspace.stats + first_of(numbers[e]), rows.members[numbers[e] / ROWS].count, stride,
                     weights + e * most, rows.value_scale);
    wait_for_copies<0>();
    __syncthreads();
    for (int i = threadIdx.x; i < num * ROW_CHUNKS; i += THREADS) {
        const int e = i / ROW_CHUNKS, d = i % ROW_CHUNKS * 4;
        const PrefixGroupMember member = rows.members[numbers[e] / ROWS];
        const float* from = sums + e * most * HEAD_DIM + d;
        const float* weight = weights + e * most;
        float sum[4] = {};
#pragma unroll 8
        for (int split = 0; split < member.count; ++split) {
            const float4 x = *reinterpret_cast<const float4*>(from + split * HEAD_DIM);
            sum[0] += weight[split] * x.x, sum[1] += weight[split] * x.y;
            sum[2] += weight[split] * x.z, sum[3] += weight[split] * x.w;
        }
        store_four(rows.out + rows.first_of(member.sequence) + numbers[e] % ROWS * HEAD_DIM + d, sum);
    }
    __syncthreads();
}

// Combines the parts of one warp's lanes with `is_complete`.
__device__ __forceinline__ void combine_parts(const MemberRows& rows, const Part& part, bool is_complete,
                                              unsigned char* shared) {
    int* numbers = reinterpret_cast<int*>(shared + SHARED_BYTES) - LIST_INTS;
    int &num = numbers[WARP_SIZE], &most = numbers[WARP_SIZE + 1];
    const u32 complete = __ballot_sync(FULL_WARP, is_complete);
    if (complete != 0) {
        const int lane = threadIdx.x % WARP_SIZE, most_here = warp_max(is_complete ? part.member.count : 0);
        int end = is_complete ? part.num_rows : 0;
#pragma unroll
        for (int offset = 1; offset < WARP_SIZE; offset *= 2) {
            const int before = __shfl_up_sync(FULL_WARP, end, offset);
            if (lane >= offset) end += before;
        }
        for (int i = 0; is_complete && i < part.num_rows; ++i) numbers[end - part.num_rows + i] = lane + i;
        if (lane == WARP_SIZE - 1) num = end, most = most_here;
    }
    __syncthreads();
    const int num_here = num, most_here = most;
    const int at_once = (SHARED_BYTES - LIST_INTS * 4) / (most_here * (HEAD_DIM + 1) * static_cast<int>(sizeof(float)));
    if (at_once > 0) {
        for (int first = 0; first < num_here; first += at_once)
            combine_together(rows, numbers + first, min(at_once, num_here - first), most, shared);
        return;
    }
    for (int e = 0; e < num_here; ++e) {
        const PrefixGroupMember member = rows.members[numbers[e] / ROWS];
        const int head = numbers[e] % ROWS;
        const i64 row = static_cast<i64>(member.first_row) * rows.num_heads + head;
        combine_splits(rows.workspace.sums + row * HEAD_DIM, rows.workspace.stats + row, 1, member.count,
                       rows.num_heads, reinterpret_cast<float*>(shared), rows.value_scale,
                       rows.out + rows.first_of(member.sequence) + head * HEAD_DIM);
        __syncthreads();  // the weights have been read
    }
}

// combine_splits of one query row, by a warp. `weights`: shared float[count].
__device__ __forceinline__ void combine_row(const MemberRows& rows, int first_row, int sequence, int count, int head,
                                            float* weights) {
    constexpr int AT_ONCE = 12;
    const int lane = threadIdx.x % WARP_SIZE, stride = rows.num_heads;
    const i64 first = static_cast<i64>(first_row) * stride + head;
    const float* sums = rows.workspace.sums + first * HEAD_DIM + lane * 4;
    float4 held[AT_ONCE];
    const auto at = [&](int split, int d) {
        return reinterpret_cast<const float4*>(sums + static_cast<i64>(split) * stride * HEAD_DIM + d);
    };
    const auto load = [&](int base, int d) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            if (base + i < count && lane * 4 + d < HEAD_DIM) held[i] = __ldcg(at(base + i, d));
    };
    load(0, 0);
    weigh_splits(rows.workspace.stats + first, count, stride, weights, rows.value_scale);
    __syncwarp();
    for (int d = 0; lane * 4 + d < HEAD_DIM; d += 4 * WARP_SIZE) {
        float sum[4] = {};
#pragma unroll 1
        for (int base = 0; base < count; base += AT_ONCE) {
            if (base > 0 || d > 0) load(base, d);
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                if (base + i >= count) break;
                const float weight = weights[base + i];
                sum[0] += weight * held[i].x, sum[1] += weight * held[i].y;
                sum[2] += weight * held[i].z, sum[3] += weight * held[i].w;
            }
        }
        store_four(rows.out + rows.first_of(sequence) + head * HEAD_DIM + lane * 4 + d, sum);
    }
    __syncwarp();  // the weights have been read
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
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    bool is_early = FETCH_EARLY;
    int held_sequence = -1, held_begin = 0, held_end = 0;  // split whose tiles are in shared memory
    KvSplit split = {};
    int num_computed = 0;
    u32 late = 0;  // bit i: this lane arrived last in the CTA's i-th slot

    for (int slot = blockIdx.y; slot < num_slots; slot += gridDim.y) {
        const KvSplit next = splits[slot];
        if (next.sequence >= num_sequences) break;
        split = next;
        ++num_computed;
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
        const bool is_held = KEPT_STAGES > 0 && split.sequence == held_sequence && split.begin == held_begin &&
                             split.end == held_end;
        attend_members(rows, head, split, scale_log2, shared, is_early, is_held);
        is_early = false;
        __syncthreads();  // its results are stored
        const Part part(rows, warp == 0 ? lane : WARP_SIZE);
        const bool is_last = part.num_rows > 0 && !part.is_for(split.row) && part.arrives_last();
        if (POLLS)
            late |= static_cast<u32>(is_last) << (num_computed - 1);
        else if (__syncthreads_or(is_last))
            combine_parts(rows, part, is_last, shared);
        if (split.end - split.begin <= KEPT_STAGES * WARPS * TILE)
            held_sequence = split.sequence, held_begin = split.begin, held_end = split.end;
        else
            held_sequence = -1;
    }
    if (is_early) wait_for_previous_kernel();
    if (!POLLS) return;

    // A single split is not read again.
    const auto split_of = [&](int i) { return num_computed == 1 ? split : splits[blockIdx.y + i * gridDim.y]; };
    float* weights = reinterpret_cast<float*>(shared) + warp * MAX_SPLITS;
    const auto combine = [&](const MemberRows& rows, const Part& part, u32 items) {
        for (; items != 0; items &= items - 1) {
            const int item = __ffs(items) - 1;
            combine_row(rows, __shfl_sync(FULL_WARP, part.member.first_row, item),
                        __shfl_sync(FULL_WARP, part.member.sequence, item),
                        __shfl_sync(FULL_WARP, part.member.count, item), item % ROWS, weights);
        }
    };
#pragma unroll 1
    for (int i = 0; i < num_computed; ++i) {
        const KvSplit own = split_of(i);
        const MemberRows rows = rows_of(own);
        const Part part(rows, lane);
        const bool is_complete = part.is_for_warp(own.row) && part.waits_for_others();
        const u32 items = __ballot_sync(FULL_WARP, is_complete);
        if (items != 0) __threadfence();  // other lanes read what this lane acquired
        __syncwarp();
        combine(rows, part, items);
    }
    if (warp != 0 || !__any_sync(FULL_WARP, late != 0)) return;
#pragma unroll 1
    for (int i = 0; i < num_computed; ++i) {
        const KvSplit own = split_of(i);
        const MemberRows rows = rows_of(own);
        const Part part(rows, lane);
        const u32 items = __ballot_sync(FULL_WARP, (late >> i & 1) != 0);
        __syncwarp();
        combine(rows, part, items);
    }
}
