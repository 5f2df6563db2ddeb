// paged_decode: decode attention (GQA, split-KV) of one query token per sequence over the paged KV cache.
//
//   q, out [S, Hq, HEAD_DIM]; kv [num_blocks, L, 2, Hkv, BLOCK_SIZE, HEAD_DIM], kv_scales float [L, 2, Hkv] with
//   QUIRE_KV_FP8; block_tables int32 [S, max_blocks]; splits KvSplit [num_slots] and members of plan_decode
//   workspace: partial_sums float [num_rows, Hq, HEAD_DIM], partial_stats float2 [num_rows, Hq]
//   grid (Hkv * SLICES, num_slots), block THREADS, shared memory SHARED_BYTES
//   reference: NumpyOps.paged_decode_attention
//   needs: arrays aligned to 16 bytes; max_blocks, scale, window > 0; no overlapping launches (num_arrived); no splits
//   if S * gridDim.x > MAX_PAIRS
//   Rows with context_len <= 0 are zeros; block ids outside the pool read as zeros.
//   roofline: bytes of visible keys and values; 0.90 of copy bandwidth from 256 MB
//
// A CTA computes ROWS query rows of a kv head over one split, or all rows of a group over one split of its prefix.
// Splits write (sum, maximum, total) to the workspace; a row's last CTA to arrive combines them (flash decoding).
#include "attention/decode_rows.cuh"

// True in thread m if this CTA arrives last for member m; other threads see the writes after the next __syncthreads.
__device__ __forceinline__ bool completes_member(const PrefixGroupMember* members, int num_members) {
    __threadfence();
    __syncthreads();
    bool is_last = false;
    if (threadIdx.x < num_members) {
        const PrefixGroupMember member = members[threadIdx.x];
        u32* counter = &num_arrived[member.sequence * gridDim.x + blockIdx.x];
        is_last = atomicInc(counter, member.count - 1) == member.count - 1;
    }
    __threadfence();
    return is_last;
}

struct SequenceRows {
    const T* q;
    int num_rows;

    __device__ __forceinline__ const T* at(int row) const { return row < num_rows ? q + row * HEAD_DIM : nullptr; }
    template <int>
    __device__ __forceinline__ SameEnds ends() const {
        return {};
    }
};

// ROWS query rows per member. `q` points to sequence 0, `workspace` to row 0.
struct GroupRows {
    const T* q;
    WorkspaceRows workspace;
    const PrefixGroupMember* members;
    int num_members, num_rows, num_heads, split_row;

    __device__ __forceinline__ bool holds(int row) const { return row / ROWS < num_members && row % ROWS < num_rows; }
    __device__ __forceinline__ const T* at(int row) const {
        if (!holds(row)) return nullptr;
        return q + (static_cast<i64>(members[row / ROWS].sequence) * num_heads + row % ROWS) * HEAD_DIM;
    }
    template <int>
    __device__ __forceinline__ SameEnds ends() const {
        return {};
    }
    __device__ __forceinline__ void store(int row, int d, const float (&sum)[4], float maximum, float total) const {
        const i64 at = static_cast<i64>(members[row / ROWS].first_row + split_row) * num_heads + row % ROWS;
        workspace.store_partial(at, d, sum, maximum, total);
    }
};

__device__ __forceinline__ void attend_group(const GroupRows& rows, const PagedHead& head, const KvSplit& split,
                                             float scale_log2, unsigned char* shared) {
#if QUIRE_DTYPE == 0
    Results<ROWS>& results = *reinterpret_cast<Results<ROWS>*>(shared);
    for (int m = 0; m < split.num_members; ++m) {
        attend(rows.at(m * ROWS), head, split, scale_log2, results);
        __syncthreads();
        const i64 row = static_cast<i64>(rows.members[m].first_row + rows.split_row) * rows.num_heads;
        merge_warps(results, WorkspaceRows{rows.workspace.sums + row * HEAD_DIM, rows.workspace.stats + row, ROWS});
        __syncthreads();
    }
#else
    Results<GROUP_ROWS>& results = *reinterpret_cast<Results<GROUP_ROWS>*>(shared);
    attend(rows, head, split, scale_log2, results, shared);
    __syncthreads();
    merge_warps(results, rows);
#endif
}

extern "C" __global__ void LAUNCH_BOUNDS
paged_decode(T* __restrict__ out, const T* __restrict__ q, const Kv* __restrict__ kv,
                       const int* __restrict__ block_tables, const KvSplit* __restrict__ splits, float* partial_sums,
                       float2* partial_stats, int num_sequences, int num_blocks, int num_layers, int layer,
                       int max_blocks, float scale_log2, const float* kv_scales) {
    extern __shared__ __align__(1024) unsigned char shared[];
    start_next_kernel();
    wait_for_previous_kernel();
    const int num_kv_heads = gridDim.x / SLICES, num_slots = gridDim.y;
    const KvSplit split = splits[blockIdx.y];
    if (split.sequence >= num_sequences) return;
    const int kv_head = blockIdx.x / SLICES, first_row = blockIdx.x % SLICES * ROWS;
    const int num_rows = min(ROWS, GROUP - first_row), num_heads = num_kv_heads * GROUP;
    const int head_row = kv_head * GROUP + first_row;
    const PagedHead head(kv, block_tables + static_cast<i64>(split.sequence) * max_blocks, num_blocks, max_blocks,
                         num_layers, layer, num_kv_heads, kv_head);
    const WorkspaceRows workspace{partial_sums + head_row * HEAD_DIM, partial_stats + head_row, num_rows};
    const KvScales scales(kv_scales, layer, num_kv_heads);
    const float value_scale = scales.value(kv_head);
    scale_log2 *= scales.key(kv_head);
    out += head_row * HEAD_DIM;
    q += head_row * HEAD_DIM;
    const auto combine = [&](int sequence, int first, int count) {
        const i64 row = static_cast<i64>(first) * num_heads;
        combine_splits(workspace.sums + row * HEAD_DIM, workspace.stats + row, num_rows, count, num_heads,
                      reinterpret_cast<float*>(shared), value_scale,
                      out + static_cast<i64>(sequence) * num_heads * HEAD_DIM);
    };

    if (split.num_members > 0) {
        const PrefixGroupMember* members =
            reinterpret_cast<const PrefixGroupMember*>(splits + num_slots) + split.first_row;
        const GroupRows rows{q, workspace, members, split.num_members, num_rows, num_heads, split.row};
        attend_group(rows, head, split, scale_log2, shared);
        const bool is_last = completes_member(members, split.num_members);
        for (int m = 0; m < split.num_members; ++m) {  // the barrier protects the previous weights
            if (__syncthreads_or(is_last && threadIdx.x == m))
                combine(members[m].sequence, members[m].first_row, members[m].count);
        }
        return;
    }
    const i64 row = static_cast<i64>(split.sequence) * num_heads;
    const OutputRows output{out + row * HEAD_DIM, num_rows, value_scale};
    if (split.end <= split.begin) {
        const float zeros[4] = {};
        for (int i = threadIdx.x; i < num_rows * (HEAD_DIM / 4); i += THREADS) store_four(output.out + i * 4, zeros);
        return;
    }
    Results<ROWS>& results = *reinterpret_cast<Results<ROWS>*>(shared);
#if QUIRE_DTYPE == 0
    attend(q + row * HEAD_DIM, head, split, scale_log2, results);
#else
    attend(SequenceRows{q + row * HEAD_DIM, num_rows}, head, split, scale_log2, results, shared);
#endif
    __syncthreads();
    if (split.count == 1) {
        merge_warps(results, output);
        return;
    }
    const i64 own_row = static_cast<i64>(split.row) * num_heads;
    merge_warps(results, WorkspaceRows{workspace.sums + own_row * HEAD_DIM, workspace.stats + own_row, num_rows});
    if (is_last_to_arrive(split.sequence * gridDim.x + blockIdx.x, split.count))
        combine(split.sequence, split.first_row, split.count);
}
