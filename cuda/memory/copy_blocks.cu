// copy_blocks: kv[targets[i]] = kv[sources[i]]; ignores ids outside the pool.
//
//   kv: num_blocks of block_vecs vectors, aligned to 16 bytes; sources, targets int32 [N]; no target is a source or
//   repeats
//   grid (N * ceil(block_vecs / (256 * VECS_PER_THREAD))), block (256)
//   reference: NumpyOps.copy_blocks; roofline: 2 N block_bytes; 0.90 of copy bandwidth from 64 MB
#include "common/types.cuh"

constexpr int VECS_PER_THREAD = 4;  // loads in flight before the first store

extern "C" __global__ void __launch_bounds__(256)
    copy_blocks(Vec<T>* kv, const int* sources, const int* targets, int num_blocks, int block_vecs, int num_chunks) {
    const int pair = blockIdx.x / num_chunks, chunk = blockIdx.x % num_chunks;
    const int source = sources[pair], target = targets[pair];
    if (source < 0 || source >= num_blocks || target < 0 || target >= num_blocks) return;
    const Vec<T>* from = kv + static_cast<i64>(source) * block_vecs;
    Vec<T>* to = kv + static_cast<i64>(target) * block_vecs;
    const i64 first = static_cast<i64>(chunk) * blockDim.x * VECS_PER_THREAD + threadIdx.x;

    Vec<T> held[VECS_PER_THREAD];
#pragma unroll
    for (int n = 0; n < VECS_PER_THREAD; n++)
        if (first + n * blockDim.x < block_vecs) held[n] = from[first + n * blockDim.x];
#pragma unroll
    for (int n = 0; n < VECS_PER_THREAD; n++)
        if (first + n * blockDim.x < block_vecs) to[first + n * blockDim.x] = held[n];
}
