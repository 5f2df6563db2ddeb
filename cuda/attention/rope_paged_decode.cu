// rope_paged_decode: rope_kv_write and paged_decode fused for few rows, each the last token of its own sequence.
//
//   qkv [S, (Hq + 2 Hkv) * D], cos .. k_norm as in rope_kv_write; kv .. splits as in paged_decode, no QUIRE_DTYPE 0
//   out [S, Hq, HEAD_DIM]; sent_sums float [num_rows, Hq, HEAD_DIM], sent_stats float2 [num_rows, Hq]: zeros before and
//   after; with MEMBERS 1, partial_sums, partial_stats of the same shapes
//   grid (Hkv * SLICES, num_slots), block THREADS, shared memory SHARED_BYTES
//   reference: NumpyOps.rope_decode_attention, with the bits of the two kernels in sequence
//   needs: as paged_decode; S * gridDim.x CTAs run at once, with MEMBERS 1 more than Hq; a position in the table and a
//   slot in the cache for each row with tokens; writes of kernels before the previous one are visible (plan, tables,
//   older tokens)
//   Rows with context_len <= 0 write no key and are zeros.
//   roofline: as paged_decode; 1 x 1100 tokens: latency
//
// Keys and values of older tokens are copied while the previous kernel runs. The CTA of a row's last split rotates and
// writes the new key and value, and combines the splits; with MEMBERS 1 the CTAs of all splits share the rows. Words
// that CTAs send each other are nonzero, so each signals its own arrival: no fence, no counter.
#include "attention/decode_rows.cuh"
#include "layer/rotate_head.cuh"

static_assert(QUIRE_DTYPE != 0, "CTAs have tiles in shared memory");

constexpr int QUERY_STRIDE = HEAD_DIM + SIZE;  // avoids bank conflicts
constexpr int MAX_POLLS = 1 << 22;  // takes seconds
constexpr int AHEAD = 8;  // splits whose sums are in flight
constexpr int MOST_SENT = 64;  // with MEMBERS 1; more splits are combined by the last CTA to arrive

__device__ __forceinline__ float as_sent(float x) { return x == 0.0f ? -0.0f : x; }

__device__ __forceinline__ float4 load_sent(const float4* from) {
    float4 x;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "l"(from)
                 : "memory");
    return x;
}

__device__ __forceinline__ float load_sent(const float* from) {
    float x;
    asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(x) : "l"(from) : "memory");
    return x;
}

__device__ __forceinline__ float2 load_sent(const float2* from) {
    float2 x;
    asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "l"(from) : "memory");
    return x;
}

template <int V>
struct SentElements;
template <>
struct SentElements<1> { using Type = float; };
template <>
struct SentElements<4> { using Type = float4; };

__device__ __forceinline__ bool is_there(float x) { return __float_as_uint(x) != 0; }
__device__ __forceinline__ bool is_there(float2 x) { return is_there(x.x) && is_there(x.y); }
__device__ __forceinline__ bool is_there(float4 x) {
    return is_there(x.x) && is_there(x.y) && is_there(x.z) && is_there(x.w);
}

// Polls for `x`, already loaded once, then zeros it in memory.
template <typename Value>
__device__ __forceinline__ Value receive(Value x, Value* from) {
    for (int poll = 0; !is_there(x); ++poll) {
        if (poll == MAX_POLLS) __trap();
        x = load_sent(from);
    }
    *from = Value{};
    return x;
}

// WorkspaceRows for a combining CTA that polls.
struct SentRows {
    float* sums;
    float2* stats;
    int num_rows;

    __device__ __forceinline__ bool holds(int row) const { return row < num_rows; }
    __device__ __forceinline__ void store(i64 row, int d, const float (&sum)[4], float maximum, float total) const {
        *reinterpret_cast<float4*>(sums + row * HEAD_DIM + d) =
            make_float4(as_sent(sum[0]), as_sent(sum[1]), as_sent(sum[2]), as_sent(sum[3]));
        if (d == 0) stats[row] = make_float2(as_sent(maximum), as_sent(total));
    }
};

// combine_splits, bit for bit, of splits that are still arriving. `weights`: shared float[2][ROWS][count].
__device__ __forceinline__ void combine_sent(float* sums, float2* stats, int num_rows, int count, int stride,
                                             float* weights, float value_scale, T* out) {
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    const int num_items = num_rows * (HEAD_DIM / 4);
    float4 held[AHEAD];
    const auto at = [&](int item, int split) {
        const i64 row = static_cast<i64>(split) * stride + item / (HEAD_DIM / 4);
        return reinterpret_cast<float4*>(sums + row * HEAD_DIM + item % (HEAD_DIM / 4) * 4);
    };
    const auto load_ahead = [&](int item, int first) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            if (first + i < count) held[i] = load_sent(at(item, first + i));
        }
    };
    if (threadIdx.x < num_items) load_ahead(threadIdx.x, 0);

    for (int row = warp; row < num_rows; row += WARPS) {
        const auto stats_of = [&](int split) { return stats + static_cast<i64>(split) * stride + row; };
        float maximum = minus_infinity(), total = 0.0f;
        for (int i = lane; i < count; i += WARP_SIZE) {
            const float2 split = receive(load_sent(stats_of(i)), stats_of(i));
            maximum = fmaxf(maximum, split.x);
            weights[row * count + i] = split.x;
            weights[(ROWS + row) * count + i] = split.y;
        }
        const float base = finite_base(warp_max(maximum));
        for (int i = lane; i < count; i += WARP_SIZE) {
            const float weight = exp2_approx(weights[row * count + i] - base);
            total += weight * weights[(ROWS + row) * count + i];
            weights[row * count + i] = weight;
        }
        const float scale = reciprocal_or_zero(warp_sum(total)) * value_scale;
        for (int i = lane; i < count; i += WARP_SIZE) weights[row * count + i] *= scale;
    }
    __syncthreads();
    for (int item = threadIdx.x; item < num_items; item += THREADS) {
        const int row = item / (HEAD_DIM / 4), d = item % (HEAD_DIM / 4) * 4;
        float sum[4] = {};
        for (int first = 0; first < count; first += AHEAD) {
            if (first > 0 || item != threadIdx.x) load_ahead(item, first);
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                if (first + i >= count) break;
                const float weight = weights[row * count + first + i];
                const float4 x = receive(held[i], at(item, first + i));
                sum[0] += weight * x.x, sum[1] += weight * x.y, sum[2] += weight * x.z, sum[3] += weight * x.w;
            }
        }
        store_four(out + row * HEAD_DIM + d, sum);
    }
}

// combine_sent, bit for bit, of V elements of a row from `d` on; polls for many splits at once. Called by a whole warp.
template <int V>
__device__ __forceinline__ void combine_elements(float* sums, const float2* stats, int count, int stride, int d,
                                                 float value_scale, T* out) {
    using Sent = typename SentElements<V>::Type;
    constexpr int AT_ONCE = 16 / V;
    constexpr int NUM_STATS = MOST_SENT / WARP_SIZE;  // per lane
    const int lane = threadIdx.x % WARP_SIZE;
    const bool has_elements = d < HEAD_DIM;
    float2 own[NUM_STATS] = {};
    float weights[NUM_STATS] = {}, sum[V] = {};
#pragma unroll 1
    for (int first = 0; first < count; first += AT_ONCE) {
        const auto at = [&](int i) {
            return reinterpret_cast<Sent*>(sums + static_cast<i64>(first + i) * stride * HEAD_DIM + d);
        };
        Sent held[AT_ONCE] = {};
#pragma unroll 1
        for (int poll = 0;; ++poll) {
            bool all = true;
#pragma unroll
            for (int n = 0; n < NUM_STATS; ++n) {
                const int split = n * WARP_SIZE + lane;
                if (first == 0 && split < count) own[n] = load_sent(stats + static_cast<i64>(split) * stride);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                if (has_elements && first + i < count) held[i] = load_sent(at(i));
            }
#pragma unroll
            for (int n = 0; n < NUM_STATS; ++n) all = all && (n * WARP_SIZE + lane >= count || is_there(own[n]));
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) all = all && (!has_elements || first + i >= count || is_there(held[i]));
            if (__all_sync(FULL_WARP, all)) break;
            if (poll == MAX_POLLS) __trap();
        }
        if (first == 0) {
            float maximum = minus_infinity(), total = 0.0f;
#pragma unroll
            for (int n = 0; n < NUM_STATS; ++n) {
                if (n * WARP_SIZE + lane < count) maximum = fmaxf(maximum, own[n].x);
            }
            const float base = finite_base(warp_max(maximum));
#pragma unroll
            for (int n = 0; n < NUM_STATS; ++n) {
                if (n * WARP_SIZE + lane >= count) continue;
                weights[n] = exp2_approx(own[n].x - base);
                total += weights[n] * own[n].y;
            }
            const float scale = reciprocal_or_zero(warp_sum(total)) * value_scale;
#pragma unroll
            for (int n = 0; n < NUM_STATS; ++n) weights[n] *= scale;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (first + i >= count) break;
            float weight = weights[0];
#pragma unroll
            for (int n = 1; n < NUM_STATS; ++n) weight = (first + i) / WARP_SIZE == n ? weights[n] : weight;
            weight = __shfl_sync(FULL_WARP, weight, (first + i) % WARP_SIZE);
            const float* x = reinterpret_cast<const float*>(&held[i]);
#pragma unroll
            for (int j = 0; j < V; ++j) sum[j] += weight * x[j];
            if (has_elements) *at(i) = Sent{};
        }
    }
#pragma unroll
    for (int j = 0; j < V; ++j) {
        if (has_elements) out[d + j] = from_float<T>(sum[j]);
    }
}

// Combines this CTA's share of a sequence's rows, dealt to its `count` splits: one row by all warps, or one per warp.
__device__ __forceinline__ void combine_shared(float* sums, float2* stats, int index, int num_rows, int count,
                                               int stride, float value_scale, T* out) {
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    if (count >= num_rows) {
        for (int d = threadIdx.x; index < num_rows && d < ceil_div(HEAD_DIM, THREADS) * THREADS; d += THREADS)
            combine_elements<1>(sums + index * HEAD_DIM, stats + index, count, stride, d, value_scale,
                                out + index * HEAD_DIM);
    } else {
        for (int row = index + warp * count; row < num_rows; row += WARPS * count) {
            for (int d = lane * 4; d < ceil_div(HEAD_DIM, 4 * WARP_SIZE) * 4 * WARP_SIZE; d += 4 * WARP_SIZE)
                combine_elements<4>(sums + row * HEAD_DIM, stats + row, count, stride, d, value_scale,
                                    out + row * HEAD_DIM);
        }
    }
    __syncthreads();  // all warps have read the statistics
    for (int i = threadIdx.x; i < num_rows * count; i += THREADS) {
        if (i % num_rows % count == index) stats[static_cast<i64>(i / num_rows) * stride + i % num_rows] = float2{};
    }
}

// A sequence's rotated query rows in shared memory.
struct RotatedRows {
    const T* queries;
    int num_rows;

    __device__ __forceinline__ const T* at(int row) const {
        return row < num_rows ? queries + row * QUERY_STRIDE : nullptr;
    }
    template <int>
    __device__ __forceinline__ SameEnds ends() const {
        return {};
    }
};

// ROWS query rows per member. `sent` points to row 0.
struct GroupRows {
    const T* queries;
    SentRows sent;
    const PrefixGroupMember* members;
    int num_members, num_rows, num_heads, split_row;

    __device__ __forceinline__ bool holds(int row) const { return row / ROWS < num_members && row % ROWS < num_rows; }
    __device__ __forceinline__ const T* at(int row) const {
        return holds(row) ? queries + row * QUERY_STRIDE : nullptr;
    }
    template <int>
    __device__ __forceinline__ SameEnds ends() const {
        return {};
    }
    __device__ __forceinline__ void store(int row, int d, const float (&sum)[4], float maximum, float total) const {
        const i64 at = static_cast<i64>(members[row / ROWS].first_row + split_row) * num_heads + row % ROWS;
        sent.store(at, d, sum, maximum, total);
    }
};

// The row's last token; its key and value are adjacent in shared memory.
struct NewToken {
    u32 key;
    int tile, row;  // -1: none in this split

    __device__ __forceinline__ void place(u32 key_tile, int at) const {
        if (at != tile) return;
        for (int chunk = threadIdx.x % WARP_SIZE; chunk < 2 * KvTile::CHUNKS; chunk += WARP_SIZE) {
            const u32 half = chunk < KvTile::CHUNKS ? key_tile : key_tile + TILE_BYTES;
            store_chunk(half + KvTile::offset(row, chunk % KvTile::CHUNKS), load_chunk(key + chunk * 16));
        }
        __syncwarp();
    }
};

// Inputs that no kernel of this step writes, except qkv.
struct RotationInputs {
    const T* qkv;
    const float* cos;
    const float* sin;
    const int* positions;
    const T* q_norm;
    const T* k_norm;
    int all_heads, table_len;
    float eps;
};

enum class HeadKind { QUERY, KEY, VALUE };

// A lane's part of a head. Inputs that no kernel of this step writes are loaded first.
struct HeadTask {
    i64 first;  // element of qkv
    const T* weight;  // null: no norm
    int position;  // -1: not rotated
    bool is_working;
    Angles angles;
    Pair norm;

    __device__ __forceinline__ HeadTask(const RotationInputs& inputs, HeadKind kind, int sequence, int head,
                                        bool is_task) {
        const int lane = threadIdx.x % TEAM, i = lane * SIZE;
        is_working = is_task && lane < LANES;
        weight = kind == HeadKind::QUERY ? inputs.q_norm : kind == HeadKind::KEY ? inputs.k_norm : nullptr;
        first = (static_cast<i64>(sequence) * inputs.all_heads + head) * HEAD_DIM + i;
        position = is_working && kind != HeadKind::VALUE ? __ldg(inputs.positions + sequence) : -1;
        if (is_working && weight != nullptr) norm.load(weight, i);
    }

    __device__ __forceinline__ void load_angles(const RotationInputs& inputs) {
        if (position >= inputs.table_len) position = -1;
        if (position < 0) return;
        const i64 row = static_cast<i64>(position) * HALF;
        angles.load(inputs.cos + row, inputs.sin + row, threadIdx.x % TEAM * SIZE);
    }

    // Called by all lanes of a warp; keys and queries at positions outside the table become zeros.
    __device__ __forceinline__ Pair rotated(const RotationInputs& inputs, HeadKind kind) const {
        Pair pair = {};
        if (is_working) pair.load(inputs.qkv + first, 0);
        const float square_sum = pair.square_sum();
        if (!is_working || kind == HeadKind::VALUE) return pair;
        if (weight != nullptr) pair.normalise(1.0f / sqrtf(square_sum / HEAD_DIM + inputs.eps), norm);
        if (position < 0) return {};
        pair.rotate(angles);
        return pair;
    }
};

extern "C" __global__ void LAUNCH_BOUNDS
rope_paged_decode(T* out, const T* qkv, const float* cos, const float* sin, const int* positions,
                  const i64* slots, const T* q_norm, const T* k_norm, Kv* kv, const int* block_tables,
                  const KvSplit* splits, float* sent_sums, float2* sent_stats, float* partial_sums,
                  float2* partial_stats, int num_sequences, int num_blocks, int num_layers, int layer, int max_blocks, int table_len, float scale_log2,
                  float eps, const float* kv_scales) {
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ __align__(16) T queries[GROUP_ROWS * QUERY_STRIDE];
    __shared__ __align__(16) Kv new_token_rows[2 * HEAD_DIM];
    start_next_kernel();
    const int num_kv_heads = gridDim.x / SLICES, num_slots = gridDim.y;
    const KvSplit split = splits[blockIdx.y];
    if (split.sequence >= num_sequences) return;
    const int kv_head = blockIdx.x / SLICES, first_row = blockIdx.x % SLICES * ROWS;
    const int num_rows = min(ROWS, GROUP - first_row), num_heads = num_kv_heads * GROUP;
    const int head_row = kv_head * GROUP + first_row;
    const bool is_group = MEMBERS > 1 && split.num_members > 0, is_empty = split.end <= split.begin;
    const bool is_last = !is_group && !is_empty && split.row == split.first_row + max(split.count, 1) - 1;
    const PrefixGroupMember* members = reinterpret_cast<const PrefixGroupMember*>(splits + num_slots) + split.first_row;
    const PagedHead head(kv, block_tables + static_cast<i64>(split.sequence) * max_blocks, num_blocks, max_blocks,
                         num_layers, layer, num_kv_heads, kv_head);
    const SentRows sent{sent_sums + head_row * HEAD_DIM, sent_stats + head_row, num_rows};
    const KvScales scales(kv_scales, layer, num_kv_heads);
    const float key_scale = scales.key(kv_head), value_scale = scales.value(kv_head);
    const i64 slot = is_last ? slots[split.sequence] : -1;
    const int num_queries = is_empty ? 0 : is_group ? split.num_members * ROWS : num_rows;
    const int num_tasks = num_queries + (is_last ? 2 : 0);
    const RotationInputs inputs{qkv, cos, sin, positions, q_norm, k_norm, num_heads + 2 * num_kv_heads, table_len, eps};
    const auto kind_of = [&](int task) {
        return task < num_queries ? HeadKind::QUERY : task == num_queries ? HeadKind::KEY : HeadKind::VALUE;
    };
    const auto task_at = [&](int task) {
        const HeadKind kind = kind_of(task);
        const bool is_query = kind == HeadKind::QUERY;
        const bool is_task = task < num_tasks && !(is_query && task % ROWS >= num_rows);
        const int sequence = is_group && is_task ? members[task / ROWS].sequence : split.sequence;
        const int own_head = is_query ? head_row + task % ROWS
                                      : num_heads + (kind == HeadKind::VALUE ? num_kv_heads : 0) + kv_head;
        return HeadTask(inputs, kind, sequence, is_task ? own_head : 0, is_task);
    };
    const auto write_head = [&](const HeadTask& head_task, int task) {
        const int i = threadIdx.x % TEAM * SIZE;
        const Pair pair = head_task.rotated(inputs, kind_of(task));
        if (!head_task.is_working) return;
        if (task < num_queries) {
            pair.store(queries + task * QUERY_STRIDE, i);
            return;
        }
        const int is_value = task - num_queries;
        const bool is_written = first_row == 0 && slot >= 0 && slot < static_cast<i64>(num_blocks) * BLOCK_SIZE;
        const i64 tile = ((slot / BLOCK_SIZE * num_layers + layer) * 2 + is_value) * num_kv_heads + kv_head;
        Kv* to = kv + (tile * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM;
        Kv* copy = new_token_rows + is_value * HEAD_DIM;
#if QUIRE_KV_FP8
        const float by = is_value ? value_scale : key_scale;
        pair.store_fp8(copy, i, by);
        if (is_written) pair.store_fp8(to, i, by);
#else
        pair.store(copy, i);
        if (is_written) pair.store(to, i);
#endif
    };
    const int first_task = threadIdx.x / TEAM;
    HeadTask early = task_at(first_task);
    TileRing ring(shared, head, split, is_last ? split.end - 1 : split.end);
    early.load_angles(inputs);
    wait_for_previous_kernel();
    write_head(early, first_task);
    for (int base = THREADS / TEAM; GROUP_ROWS + 2 > THREADS / TEAM && base < num_tasks; base += THREADS / TEAM) {
        HeadTask later = task_at(base + first_task);
        later.load_angles(inputs);
        write_head(later, base + first_task);
    }
    __syncthreads();
    scale_log2 *= key_scale;

    if (is_group) {
        const GroupRows rows{queries, sent, members, split.num_members, num_rows, num_heads, split.row};
        Results<GROUP_ROWS>& results = *reinterpret_cast<Results<GROUP_ROWS>*>(shared);
        attend(ring, rows, head, split, scale_log2, results, NoNewToken{});
        __syncthreads();
        merge_warps(results, rows);
        return;
    }
    const i64 row = static_cast<i64>(split.sequence) * num_heads + head_row;
    T* output = out + row * HEAD_DIM;
    if (is_empty) {
        const float zeros[4] = {};
        for (int i = threadIdx.x; i < num_rows * (HEAD_DIM / 4); i += THREADS) store_four(output + i * 4, zeros);
    } else {
        Results<ROWS>& results = *reinterpret_cast<Results<ROWS>*>(shared);
        const int last = split.end - 1;
        const NewToken new_token{shared_address(new_token_rows), is_last ? last / TILE : -1, last % TILE};
        attend(ring, RotatedRows{queries, num_rows}, head, split, scale_log2, results, new_token);
        __syncthreads();
        if (split.count == 1) {
            merge_warps(results, OutputRows{output, num_rows, value_scale});
        } else if (MEMBERS == 1 && split.count > MOST_SENT) {
            const i64 own_row = static_cast<i64>(split.row) * num_heads + head_row;
            merge_warps(results,
                        WorkspaceRows{partial_sums + own_row * HEAD_DIM, partial_stats + own_row, num_rows});
            if (!is_last_to_arrive(split.sequence * gridDim.x + blockIdx.x, split.count)) return;
            const i64 first = static_cast<i64>(split.first_row) * num_heads + head_row;
            combine_splits(partial_sums + first * HEAD_DIM, partial_stats + first, num_rows, split.count, num_heads,
                           reinterpret_cast<float*>(shared), value_scale, output);
        } else {
            const i64 own_row = static_cast<i64>(split.row) * num_heads;
            merge_warps(results, SentRows{sent.sums + own_row * HEAD_DIM, sent.stats + own_row, num_rows});
            const i64 first = static_cast<i64>(split.first_row) * num_heads;
#if MEMBERS == 1
            combine_shared(sent.sums + first * HEAD_DIM, sent.stats + first, split.row - split.first_row, num_rows,
                           split.count, num_heads, value_scale, output);
#else
            if (!is_last) return;
            __syncthreads();  // the weights replace the results
            combine_sent(sent.sums + first * HEAD_DIM, sent.stats + first, num_rows, split.count, num_heads,
                         reinterpret_cast<float*>(shared), value_scale, output);
#endif
        }
    }
}
