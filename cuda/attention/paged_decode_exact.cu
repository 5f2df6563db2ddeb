// paged_decode_exact: paged_decode by the plan of plan_exact_rows: each row gets the bits of a batch of one.
//
//   as paged_decode, and int num_slots; grid (Hkv * SLICES, stripes): a CTA takes each gridDim.y-th slot
//   reference: NumpyOps.paged_decode_attention; roofline: that of paged_decode
//
// A CTA computes a split for up to MEMBERS rows of a sequence, each up to its own end. Row r is combined by the CTA of
// its split r % count, which polls for the others; if it gives up, by the last CTA to arrive.
#include "attention/decode_rows.cuh"

constexpr int MAX_POLLS = 1 << 12;  // a few ms; never reached while all CTAs run at once

// ROWS a member. `q`, `out` and `workspace` point to sequence 0 and row 0.
struct MemberRows {
    const T* q;
    T* out;
    WorkspaceRows workspace;
    const PrefixGroupMember* members;
    int num_members, num_rows, num_heads, split_row;
    float value_scale;

    __device__ __forceinline__ bool holds(int row) const { return row / ROWS < num_members && row % ROWS < num_rows; }
    __device__ __forceinline__ i64 first_of(int sequence) const {
        return static_cast<i64>(sequence) * num_heads * HEAD_DIM;
    }
    __device__ __forceinline__ const T* at(int row) const {
        return holds(row) ? q + first_of(members[row / ROWS].sequence) + row % ROWS * HEAD_DIM : nullptr;
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
    __device__ __forceinline__ void combine(const PrefixGroupMember& member, float* weights) const {
        const i64 row = static_cast<i64>(member.first_row) * num_heads;
        combine_splits(workspace.sums + row * HEAD_DIM, workspace.stats + row, num_rows, member.count, num_heads,
                       weights, value_scale, out + first_of(member.sequence));
    }
};

#if QUIRE_DTYPE == 0

__device__ __forceinline__ void attend_members(const MemberRows& rows, const PagedHead& head, const KvSplit& split,
                                               float scale_log2, unsigned char* shared) {
    Results<ROWS>& results = *reinterpret_cast<Results<ROWS>*>(shared);
    for (int m = 0; m < split.num_members; ++m) {
        KvSplit own = split;
        own.end = min(split.end, rows.members[m].end);
        MemberRows row = rows;
        row.members += m;
        row.num_members = 1;
        attend(row.at(0), head, own, scale_log2, results);
        __syncthreads();
        merge_warps(results, row);
        __syncthreads();
    }
}

#else

template <int NUM_ROWS>
__device__ __forceinline__ void attend_rows(const MemberRows& rows, const PagedHead& head, const KvSplit& split,
                                            float scale_log2, unsigned char* shared) {
    Results<NUM_ROWS>& results = *reinterpret_cast<Results<NUM_ROWS>*>(shared);
    attend(rows, head, split, scale_log2, results, shared);
    __syncthreads();
    merge_warps(results, rows);
}

__device__ __forceinline__ void attend_members(const MemberRows& rows, const PagedHead& head, const KvSplit& split,
                                               float scale_log2, unsigned char* shared) {
    const int num_rows = split.num_members * ROWS;
    if (GROUP_ROWS <= 8 || num_rows <= 8)
        attend_rows<at_most(GROUP_ROWS, 8)>(rows, head, split, scale_log2, shared);
    else if (GROUP_ROWS <= 16 || num_rows <= 16)
        attend_rows<at_most(GROUP_ROWS, 16)>(rows, head, split, scale_log2, shared);
    else if (GROUP_ROWS <= 24 || num_rows <= 24)
        attend_rows<at_most(GROUP_ROWS, 24)>(rows, head, split, scale_log2, shared);
    else
        attend_rows<GROUP_ROWS>(rows, head, split, scale_log2, shared);
}

#endif

__device__ __forceinline__ u32 load_acquire(const u32* from) {
    u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

__device__ __forceinline__ bool combines(const PrefixGroupMember& member, int split_row) {
    return member.sequence % member.count == split_row;
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

__device__ __forceinline__ void combine_members(const MemberRows& rows, bool is_complete, float* weights) {
    __threadfence();
    for (int m = 0; m < rows.num_members; ++m) {  // the barrier protects the previous weights
        if (__syncthreads_or(is_complete && threadIdx.x == m)) rows.combine(rows.members[m], weights);
    }
}

extern "C" __global__ void LAUNCH_BOUNDS
paged_decode_exact(T* __restrict__ out, const T* __restrict__ q, const Kv* __restrict__ kv,
                   const int* __restrict__ block_tables, const KvSplit* __restrict__ splits, float* partial_sums,
                   float2* partial_stats, int num_sequences, int num_blocks, int num_layers, int layer, int max_blocks,
                   float scale_log2, const float* kv_scales, int num_slots) {
    extern __shared__ __align__(1024) unsigned char shared[];
    start_next_kernel();
    wait_for_previous_kernel();
    const int num_kv_heads = gridDim.x / SLICES, kv_head = blockIdx.x / SLICES, first_row = blockIdx.x % SLICES * ROWS;
    const int num_rows = min(ROWS, GROUP - first_row), num_heads = num_kv_heads * GROUP;
    const int head_row = kv_head * GROUP + first_row;
    const WorkspaceRows workspace{partial_sums + head_row * HEAD_DIM, partial_stats + head_row, num_rows};
    const PrefixGroupMember* members = reinterpret_cast<const PrefixGroupMember*>(splits + num_slots);
    const KvScales scales(kv_scales, layer, num_kv_heads);
    scale_log2 *= scales.key(kv_head);
    float* weights = reinterpret_cast<float*>(shared);
    const auto rows_of = [&](const KvSplit& split) {
        return MemberRows{q + head_row * HEAD_DIM, out + head_row * HEAD_DIM, workspace, members + split.first_row,
                          split.num_members, num_rows, num_heads, split.row, scales.value(kv_head)};
    };
    const auto counter_of = [&](int sequence) { return &num_arrived[sequence * gridDim.x + blockIdx.x]; };

    for (int slot = blockIdx.y; slot < num_slots; slot += gridDim.y) {
        const KvSplit split = splits[slot];
        if (split.sequence >= num_sequences) break;
        const MemberRows rows = rows_of(split);
        if (split.end <= split.begin) {
            rows.store_zeros();
            continue;
        }
        const PagedHead head(kv, block_tables + static_cast<i64>(split.sequence) * max_blocks, num_blocks, max_blocks,
                             num_layers, layer, num_kv_heads, kv_head);
        __syncthreads();  // shared memory of the previous slot is free
        attend_members(rows, head, split, scale_log2, shared);
        __threadfence();
        __syncthreads();
        bool is_last = false;
        if (threadIdx.x < split.num_members) {
            const PrefixGroupMember member = rows.members[threadIdx.x];
            if (member.count > 1 && !combines(member, split.row))
                is_last = atomicInc(counter_of(member.sequence), member.count - 1) == member.count - 1;
        }
        if (__syncthreads_or(is_last)) combine_members(rows, is_last, weights);
    }
    for (int slot = blockIdx.y; slot < num_slots; slot += gridDim.y) {
        const KvSplit split = splits[slot];
        if (split.sequence >= num_sequences) break;
        const MemberRows rows = rows_of(split);
        bool is_complete = false, is_ours = false;
        if (threadIdx.x < split.num_members) {
            const PrefixGroupMember member = rows.members[threadIdx.x];
            is_ours = member.count > 1 && combines(member, split.row);
            if (is_ours) is_complete = waits_for_others(counter_of(member.sequence), member.count);
        }
        if (__syncthreads_or(is_ours)) combine_members(rows, is_complete, weights);
    }
}
