// silu_mul_quantised_sm90: silu_mul_quantised of few wide rows on Hopper, a cluster per row: exp would bound a block.
//
//   gate_up and out aligned to 16 bytes, I / 8 whole vectors, at most HELD_VECS per thread
//   grid (8 T), clusters of 8, which exchange maxima; block (multiple of 32)
//   reference: NumpyOps.silu_mul_quantised, with the bits of silu_mul_quantised
//   roofline: latency, 2.4 us within a step at T = 1, I = 14336
#include "common/fp8.cuh"
#include "common/wgmma.cuh"
#include "layer/gated.cuh"

constexpr int CLUSTER = 8;

// Maximum over the cluster, whose blocks have called arrive_at_cluster.
__device__ __forceinline__ u32 cluster_max(u32 largest) {
    __shared__ u32 of_blocks[CLUSTER];
    largest = block_max(largest, 0u);
    wait_for_cluster();  // the other blocks' shared memory exists
    if (threadIdx.x < CLUSTER) {
        const u32 there = address_in(threadIdx.x, shared_address(of_blocks + blockIdx.x % CLUSTER));
        asm volatile("st.shared::cluster.u32 [%0], %1;" : : "r"(there), "r"(largest) : "memory");
    }
    asm volatile("barrier.cluster.arrive.release.aligned;" : : : "memory");
    wait_for_cluster();
#pragma unroll
    for (int n = 0; n < CLUSTER; n++) largest = max(largest, of_blocks[n]);
    return largest;
}

extern "C" __global__ void __launch_bounds__(1024)
    silu_mul_quantised_sm90(const T* gate_up, u8* out, float* scale, int width) {
    start_next_kernel();
    arrive_at_cluster();
    wait_for_previous_kernel();
    const int row = blockIdx.x / CLUSTER, part = blockIdx.x % CLUSTER, size = width / CLUSTER;
    const T* gate = gate_up + 2 * static_cast<i64>(row) * width;
    const T* up = gate + width;
    u8* to = out + static_cast<i64>(row) * width;
    scale += row;
    const int first = part * size;
    Vec<T> held[HELD_VECS];
    for_each_vec(held, size, [=](Vec<T>& vec, int i) {
        const Vec<T> a = load_vec(gate + first + i), b = load_vec(up + first + i);
        vec = gated(a, b);
    });
    quantise_held(held, size, to + first, scale, cluster_max);
}
