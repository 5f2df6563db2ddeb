// group_by_expert: sorts pairs of a row and an expert by expert, then by row.
//
//   ids int32 [T, k] -> rows int32 [P], each sorted pair's; places int32 [T, k], where pairs are sorted to; offsets
//   int32 [E + 1]; P = T k, E <= 1024. A pair with an id outside 0..E-1 is left out: its place is -1, and rows from
//   offsets[E] on are not written.
//   grid (1), block (512), dynamic shared memory: 16 E counters of four bytes
//   reference: NumpyOps.group_by_expert
//   roofline: 16 P bytes moved; bound by P / 512 rounds of a warp: about 3 us for P = 512, 25 us for P = 65,536
//
// Each warp counts and then places a consecutive part of the pairs, to keep their order.
#include "common/types.cuh"

constexpr int WARPS = 16;

// The lanes with this lane's expert, and whether it is their first.
struct Alike {
    u32 lanes;
    int before;  // with lower numbers

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

    // Turns each warp's counts into where its first pair of each expert goes.
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
