// small_m_w4a16_sm90: out[m] = x[m] @ weight.T + bias with 4-bit weights on Hopper (sm_90a), for up to 256 rows. Up to 64
// the time is nearly that of reading the weights once, beyond that of the products.
//
//   x [M, K] as a 2-D tensor map with boxes of 64 elements x COLS rows and the 128-byte swizzle; tiles, scale and zero
//   (or null) as in int4.cuh; bias [N] or null, out [M, N]; M <= COLS; group_spans are the spans of 128 columns in a group
//   (1 with GROUPS > 1)
//   A build defines BLOCKS (weight rows of a tile, in sixteens, at most 16), COLS (rows of x: 32, 64, 96, 128, 192,
//   256), STAGES (of the ring in shared memory), AHEAD (stages whose weights do not wait for the previous kernel), SPLIT
//   (1, 2 or 4: the blocks of a cluster that split K of a tile), SHARED_BYTES, OUT_FLOAT: out has the build's type (0)
//   or float32 (1), and those of int4.cuh.
//   grid: with SPLIT 1 up to one block a tile, else SPLIT blocks a tile; block THREADS
//   reference: NumpyOps.linear
//   needs: all arrays aligned to 16 bytes, N a multiple of 16, K of 128
//   roofline: N K / 2 bytes and the scales moved, or 2 M N K operations; 0.8 of the larger time from 30 MB of weights
//
// A tile of out, transposed, is 16 BLOCKS weight rows times COLS rows of x, by wgmma: 64 weight rows a warpgroup, whose
// threads unpack their own weights into the registers that wgmma reads, scaled and rounded to the build's type. One more
// warp fetches weights and x, 128 elements of K a stage. With SPLIT each block sums its own chunks of 8 rows of x over the
// cluster, in the order of the blocks. The order of an element's sum depends on K and SPLIT alone: a row of x gives the
// same bits in any batch.
#include "common/int4.cuh"
#include "common/wgmma_registers.cuh"

#if QUIRE_DTYPE == 0
#error "the tensor cores take float16 and bfloat16"
#endif
#if OUT_FLOAT
using Out = float;
#else
using Out = T;
#endif

constexpr int WARPGROUPS = (BLOCKS + 3) / 4;
constexpr int CONSUMERS = WARPGROUP_SIZE * WARPGROUPS;
constexpr int THREADS = CONSUMERS + WARPGROUP_SIZE;  // of the last warpgroup one warp fetches: it gives up its registers
constexpr int PRODUCER_REGISTERS = 40;
constexpr int CONSUMER_REGISTERS = WARPGROUPS <= 2 ? 232 : WARPGROUPS == 3 ? 152 : 104;
constexpr int BOX_BYTES = COLS * 128;  // 64 elements of K of x
constexpr int X_BYTES = 2 * BOX_BYTES;
constexpr int STAGE_BYTES = X_BYTES + BLOCKS * SPAN_BYTES;
constexpr int SCALES_BYTES = GROUPS * BLOCKS * SCALE_BYTES;                   // of a stage
constexpr int PARAMETER_BYTES = SCALES_BYTES + GROUPS * BLOCKS * ZERO_BYTES;  // of a stage
constexpr int CHUNKS = COLS / 8;                                     // of a warpgroup's sums: 8 rows of x, four sums a thread
constexpr int OWN_CHUNKS = CHUNKS / SPLIT;
constexpr int SENT_BYTES = (SPLIT - 1) * CONSUMERS * OWN_CHUNKS * 16;
static_assert(AHEAD <= STAGES, "AHEAD stages fit in the ring");
static_assert(BLOCKS <= 16 && CHUNKS % SPLIT == 0, "as registers allow; a block sums whole chunks");
static_assert(SENT_BYTES <= STAGES * STAGE_BYTES, "what is sent fits in the ring");
static_assert(SHARED_BYTES == 1024 + STAGES * (STAGE_BYTES + PARAMETER_BYTES + 16) + 16, "the launcher's memory is not this");

// Shared memory: STAGES of x and weights, which in the end hold the sums from the other blocks; STAGES of scales and
// zero points; barriers: full and empty for each stage, and one for the sums sent.
struct Shared {
    u32 base;

    __device__ __forceinline__ u32 x(u32 iteration) const { return base + iteration % STAGES * STAGE_BYTES; }
    __device__ __forceinline__ u32 weights(u32 iteration) const { return x(iteration) + X_BYTES; }
    __device__ __forceinline__ u32 scales(u32 iteration) const {
        return base + STAGES * STAGE_BYTES + iteration % STAGES * PARAMETER_BYTES;
    }
    __device__ __forceinline__ u32 zeros(u32 iteration) const { return scales(iteration) + SCALES_BYTES; }
    __device__ __forceinline__ u32 barrier(int i) const {
        return base + STAGES * (STAGE_BYTES + PARAMETER_BYTES) + 8 * i;
    }
    __device__ __forceinline__ u32 full(u32 iteration) const { return barrier(iteration % STAGES); }
    __device__ __forceinline__ u32 empty(u32 iteration) const { return barrier(STAGES + iteration % STAGES); }
    __device__ __forceinline__ u32 all_sent() const { return barrier(2 * STAGES); }
    __device__ __forceinline__ u32 parity(u32 iteration) const { return iteration / STAGES % 2; }
};

// A block's share of the work: its split of K for one tile, then for the next. An iteration fills one stage.
struct BlockWork {
    int split, first_tile, num_tiles, first_span, num_spans, num_blocks;

    __device__ __forceinline__ BlockWork(int n_size, int k_size) {
        const int spans = k_size / SPAN, step = gridDim.x / SPLIT;
        num_blocks = n_size / BLOCK_ROWS;
        split = blockIdx.x % SPLIT;
        first_tile = blockIdx.x / SPLIT;
        num_tiles = ((num_blocks + BLOCKS - 1) / BLOCKS - first_tile + step - 1) / step;
        first_span = spans * split / SPLIT;
        num_spans = spans * (split + 1) / SPLIT - first_span;
    }
    __device__ __forceinline__ u32 num_iterations() const { return num_tiles * num_spans; }
    __device__ __forceinline__ int span(u32 iteration) const { return first_span + iteration % num_spans; }
    // Sixteens of weight rows.
    __device__ __forceinline__ int first_block(int tile) const {
        return (first_tile + tile * (gridDim.x / SPLIT)) * BLOCKS;
    }
};

// Copies bytes that lie together, read once.
__device__ __forceinline__ void copy_bytes(u32 to_shared, const void* from, int num_bytes, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
        :
        : "r"(to_shared), "l"(from), "r"(num_bytes), "r"(barrier), "l"(policy)
        : "memory");
}

// The thread that fetches.
struct Producer {
    const Shared& shared;
    const BlockWork& work;
    const TensorMap& x_map;
    const u8* tiles;
    const u16* scale;
    const u8* zero;
    int group_spans;
    u64 policy;

    __device__ __forceinline__ void fetch_weights(u32 iteration) const {
        const int first = work.first_block(iteration / work.num_spans), span = work.span(iteration);
        const int blocks = min(BLOCKS, work.num_blocks - first);
        const u32 barrier = shared.full(iteration);
        arrive_expecting(barrier, X_BYTES + blocks * (SPAN_BYTES + GROUPS * (SCALE_BYTES + ZERO_BYTES)));
        const i64 piece = static_cast<i64>(span) * work.num_blocks + first;
        copy_bytes(shared.weights(iteration), tiles + piece * SPAN_BYTES, blocks * SPAN_BYTES, barrier, policy);
#pragma unroll
        for (int i = 0; i < GROUPS; ++i) {
            const int group = GROUPS > 1 ? span * GROUPS + i : span / group_spans;
            const i64 from = (static_cast<i64>(group) * work.num_blocks + first) * BLOCK_ROWS;
            copy_bytes(shared.scales(iteration) + i * BLOCKS * SCALE_BYTES, scale + from, blocks * SCALE_BYTES, barrier,
                       policy);
            if (ZEROS)
                copy_bytes(shared.zeros(iteration) + i * BLOCKS * ZERO_BYTES, zero + from, blocks * ZERO_BYTES, barrier,
                           policy);
        }
    }
    __device__ __forceinline__ void fetch_x(u32 iteration) const {
        const int k = work.span(iteration) * SPAN;
        copy_box(shared.x(iteration), x_map, k, 0, shared.full(iteration));
        copy_box(shared.x(iteration) + BOX_BYTES, x_map, k + SPAN / 2, 0, shared.full(iteration));
    }
    __device__ __forceinline__ void fetch_ahead() const {
        for (u32 iteration = 0; iteration < min(static_cast<u32>(AHEAD), work.num_iterations()); ++iteration)
            fetch_weights(iteration);
    }
    __device__ __forceinline__ void fetch_all() const {
        for (u32 iteration = 0; iteration < work.num_iterations(); ++iteration) {
            if (iteration >= STAGES) wait_for(shared.empty(iteration), shared.parity(iteration) ^ 1);
            if (iteration >= AHEAD) fetch_weights(iteration);
            fetch_x(iteration);
        }
    }
};

__device__ __forceinline__ u32 load_word(u32 address) {
    u32 word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
    return word;
}

__device__ __forceinline__ u16 load_half_word(u32 address) {
    u16 word;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(word) : "r"(address) : "memory");
    return word;
}

__device__ __forceinline__ void load_words(u32 (&words)[4], u32 address) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
}

// The scales of rows g and g + 8, rounded to the build's type, each twice.
__device__ __forceinline__ void pair_scales(u32& near, u32& far, u32 both) {
    if (SCALE_BF16 != (QUIRE_DTYPE == 2)) {
        const float2 scales = widen_scales(both);
        both = pack_pair(scales.x, scales.y);
    }
    near = __byte_perm(both, 0, 0x1010);
    far = __byte_perm(both, 0, 0x3232);
}

using Sums = float[COLS / 2];

// Unpacks a warp's 16 rows x 64 columns, half `half` of a stage.
__device__ __forceinline__ void unpack_half(Fragments& a, const Shared& shared, u32 iteration, int half) {
    const int lane = threadIdx.x % WARP_SIZE, g = lane / 4;
    const int block = min(static_cast<int>(threadIdx.x) / WARP_SIZE, BLOCKS - 1);
    u32 words[4];
    load_words(words, shared.weights(iteration) + block * SPAN_BYTES + half * TILE_BYTES + lane * 16);
    Zeros zeros;
    u32 near = 0, far = 0;
#pragma unroll
    for (int s = 0; s < 4; ++s) {
        if (s == 0 || s % GROUP_STEPS == 0) {
            const int group = (half * 4 + s) / GROUP_STEPS * BLOCKS + block;
            pair_scales(near, far, load_word(shared.scales(iteration) + group * BLOCK_ROWS * 2 + g * 4));
            if (ZEROS) zeros = Zeros(load_half_word(shared.zeros(iteration) + group * BLOCK_ROWS + g * 2));
        }
        unpack(a[s], words[s], zeros);
        a[s][0] = multiply_pair(a[s][0], near);
        a[s][1] = multiply_pair(a[s][1], far);
        a[s][2] = multiply_pair(a[s][2], near);
        a[s][3] = multiply_pair(a[s][3], far);
    }
}

// The sums of one tile over this block's split of K, which starts at `iteration`. While the tensor cores multiply one
// half of a stage, the threads unpack the next.
__device__ __forceinline__ void sum_tile(Sums& sum, const Shared& shared, const BlockWork& work, u32 iteration) {
    const bool arrives = threadIdx.x % WARP_SIZE == 0;
    Fragments even, odd = {};
#pragma unroll
    for (int i = 0; i < COLS / 2; ++i) sum[i] = 0.0f;
    for (int n = 0; n < work.num_spans; ++n, ++iteration) {
        wait_for(shared.full(iteration), shared.parity(iteration));
        unpack_half(even, shared, iteration, 0);
        start_products(sum, even, shared.x(iteration));
        wait_for_products<1>(sum);
        hold(odd);
        if (n > 0 && arrives) arrive(shared.empty(iteration - 1));
        unpack_half(odd, shared, iteration, 1);
        start_products(sum, odd, shared.x(iteration) + BOX_BYTES);
        wait_for_products<1>(sum);
        hold(even);
    }
    wait_for_products<0>(sum);
    hold(odd);
    if (work.num_spans > 0 && arrives) arrive(shared.empty(iteration - 1));
}

// A warp's part of the output tile, and the bias of this thread's two weight rows.
struct OutputTile {
    Out* out;
    int first;  // weight row: of this warp's sixteen
    int num_rows, n_size;
    bool is_inside;
    float bias[2];

    __device__ __forceinline__ OutputTile(Out* out, const T* add, int first_block, int num_rows, int n_size)
        : out(out), num_rows(num_rows), n_size(n_size) {
        const int block = threadIdx.x / WARP_SIZE;
        first = (first_block + block) * BLOCK_ROWS;
        is_inside = block < BLOCKS && first < n_size;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = first + 8 * half + threadIdx.x % WARP_SIZE / 4;
            bias[half] = add != nullptr && is_inside ? to_float(add[row]) : 0.0f;
        }
    }

    // Stores rows 8 chunk to 8 chunk + 7 of x. 16-bit results are transposed first: lane t of a row stores elements 4t to
    // 4t + 3 of the warp's sixteen.
    __device__ __forceinline__ void store(int chunk, const float (&four)[4]) const {
        const int lane = threadIdx.x % WARP_SIZE, g = lane / 4, t = lane % 4;
        if (!is_inside) return;
#if OUT_FLOAT
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int m = 8 * chunk + 2 * t + i % 2, n = first + g + i / 2 * 8;
            if (m < num_rows) out[static_cast<i64>(m) * n_size + n] = four[i] + bias[i / 2];
        }
#else
        const u32 near = transpose_matrix(pack_pair(four[0] + bias[0], four[1] + bias[0]));
        const u32 far = transpose_matrix(pack_pair(four[2] + bias[1], four[3] + bias[1]));
        const int from = lane / 4 * 4 + t % 2 * 2;
        const u32 low[2] = {__shfl_sync(FULL_WARP, near, from), __shfl_sync(FULL_WARP, near, from + 1)};
        const u32 high[2] = {__shfl_sync(FULL_WARP, far, from), __shfl_sync(FULL_WARP, far, from + 1)};
        const int m = 8 * chunk + g;
        if (m < num_rows)
            *reinterpret_cast<uint2*>(out + static_cast<i64>(m) * n_size + first + 4 * t) =
                t < 2 ? make_uint2(low[0], low[1]) : make_uint2(high[0], high[1]);
#endif
    }
};

__device__ __forceinline__ void store_all(const Sums& sum, const OutputTile& output) {
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        const float four[4] = {sum[4 * chunk], sum[4 * chunk + 1], sum[4 * chunk + 2], sum[4 * chunk + 3]};
        output.store(chunk, four);
    }
}

__device__ __forceinline__ void sync_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;" : : : "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" : : : "memory");
}

// Sends every other block its chunks, and stores this block's. Chunk SPLIT i + rank belongs to block `rank`. All blocks
// have read their rings, where the sums arrive: those of block r at place r, the own one left out.
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
    const BlockWork work(n_size, k_size);
    const Producer producer{shared, work, x_map, tiles, scale, zero, group_spans, policy_of_read_once()};

    const bool fetches = threadIdx.x == CONSUMERS;

    start_next_kernel();
    if (fetches) {
        prefetch_map(x_map);
        for (int stage = 0; stage < STAGES; ++stage) {
            make_barrier(shared.full(stage), 1);
            make_barrier(shared.empty(stage), CONSUMERS / WARP_SIZE);
        }
        make_barrier(shared.all_sent(), 1);
        publish_barriers();
        if (SPLIT > 1) arrive_expecting(shared.all_sent(), SENT_BYTES);
        producer.fetch_ahead();
    }
    __syncthreads();
    wait_for_previous_kernel();
    if (threadIdx.x >= CONSUMERS) {
        give_up_registers<PRODUCER_REGISTERS>();
        if (fetches) producer.fetch_all();
        __syncwarp();
        if (SPLIT > 1) sync_cluster();
    } else {
        take_registers<CONSUMER_REGISTERS>();
        for (int tile = 0; tile < work.num_tiles; ++tile) {
            Sums sum;
            sum_tile(sum, shared, work, tile * work.num_spans);
            const OutputTile output(out, bias, work.first_block(tile), num_rows, n_size);
            if (SPLIT > 1) {
                sync_cluster();
                store_own(sum, output, shared, work.split);
            } else {
                store_all(sum, output);
            }
        }
    }
}
