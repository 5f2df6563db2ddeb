// group_by_expert: MoE counting sort of (row, expert) pairs by expert, then row.
//
//   ids int32 [T, k] -> rows int32 [P] of sorted pairs, places int32 [T, k] of pairs, offsets int32 [E + 1]; P = T k,
//   E <= 1024. A pair with an id outside 0..E-1 has place -1; rows from offsets[E] on are not written.
//   grid (1), block (512), shared memory: 64 E bytes; warps count and place consecutive pairs, to keep their order
//   reference: NumpyOps.group_by_expert
//   roofline: 16 P bytes; bound by P / 512 rounds of a warp: about 3 us for P = 512, 25 us for 65,536
#include "common/types.cuh"

constexpr int WARPS = 16;

// Lanes with this lane's expert.
struct Alike {
    u32 lanes;
    int before;  // lower lanes among them

    __device__ __forceinline__ explicit Alike(int expert) : lanes(__match_any_sync(FULL_WARP, expert)) {
        before = __popc(lanes & ((1u << (threadIdx.x % WARP_SIZE)) - 1));
    }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    group_by_expert(const int* ids, int* rows, int* places, int* offsets, int num_pairs, int num_experts, int num_used) {
    extern __shared__ int counts[];  // [WARPS][E]
    start_next_kernel();
    wait_for_previous_kernel();
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    const int part = (num_pairs + 32 * WARPS - 1) / (32 * WARPS) * 32;
    const int begin = warp * part, end = min(begin + part, num_pairs);
    int* own = counts + warp * num_experts;
    for (int e = lane; e < num_experts; e += WARP_SIZE) own[e] = 0;
    __syncwarp();
    for (int first = begin; first < end; first += WARP_SIZE) {
        const int pair = first + lane, id = pair < end ? ids[pair] : -1;
        const Alike alike(id);
        if (alike.before == 0 && id >= 0 && id < num_experts) own[id] += __popc(alike.lanes);
        __syncwarp();
    }
    __syncthreads();

    // Each warp's counts become its first places.
    int before = 0;
    for (int first = 0; first < num_experts; first += 32 * WARPS) {
        const int e = first + threadIdx.x;
        int count = 0, total;
        for (int w = 0; e < num_experts && w < WARPS; w++) count += counts[w * num_experts + e];
        int place = before + block_scan(count, &total) - count;
        if (e < num_experts) offsets[e] = place;
        for (int w = 0; e < num_experts && w < WARPS; w++) {
            const int of_warp = counts[w * num_experts + e];
            counts[w * num_experts + e] = place;
            place += of_warp;
        }
        before += total;
    }
    if (threadIdx.x == 0) offsets[num_experts] = before;
    __syncthreads();

    for (int first = begin; first < end; first += WARP_SIZE) {
        const int pair = first + lane, id = pair < end ? ids[pair] : -1;
        const bool is_known = id >= 0 && id < num_experts;
        const Alike alike(id);
        const int place = is_known ? own[id] + alike.before : -1;
        __syncwarp();
        if (pair < end) places[pair] = place;
        if (is_known) {
            rows[place] = pair / num_used;
            if (alike.before == 0) own[id] += __popc(alike.lanes);
        }
        __syncwarp();
    }
}
