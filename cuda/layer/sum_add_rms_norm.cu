// sum_add_rms_norm: add_rms_norm of x[t] = the sum over ranks of parts[r][t], in rank order in float, rounded to T once.
// Every rank launches it, on its own device; each reads its peers' parts, so all get the same bits.
//
//   parts [NUM_RANKS]    addresses of each rank's [T, H], that its peers can read; two buffers by turns, so that a rank
//                        writes one only after a later sum has shown that its peers have read it
//   signals [NUM_RANKS]  addresses of each rank's u32 [NUM_RANKS, max_rows]: the last sum for which a peer's row is there
//   num_sums [max_rows]  this rank's sums of each row; as all signals zero at start, and only growing
//   error                set to 1 + the rank that did not come within LIMIT_NS; the results are then undefined
//   residual, out [T, H], weight [H]
//   grid (T), T <= max_rows, all blocks resident at once; block as for add_rms_norm
//   reference: NumpyCollectives.sum, then NumpyOps.add_rms_norm
//   roofline: one exchange of signals, and (NUM_RANKS - 1) T H elements over the links; not measured
#include "layer/norm_row.cuh"

#ifndef NUM_RANKS
#error "define NUM_RANKS: 2, 4 or 8"
#endif

constexpr u64 LIMIT_NS = 4000000000ull;

__device__ __forceinline__ void store_release(u32* to, u32 value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" : : "l"(to), "r"(value) : "memory");
}

__device__ __forceinline__ u32 load_acquire(const u32* from) {
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

__device__ __forceinline__ u64 now_ns() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now) : : "memory");
    return now;
}

// Whether a peer's signal reaches `wanted` before the limit, and before another block gives up.
__device__ __forceinline__ bool await_signal(const u32* from, u32 wanted, const u32* error) {
    const u64 start = now_ns();
    while (static_cast<int>(load_acquire(from) - wanted) < 0)
        if (now_ns() - start > LIMIT_NS || load_acquire(error) != 0) return false;
    return true;
}

extern "C" __global__ void __launch_bounds__(1024)
    sum_add_rms_norm(const T* const* parts, u32* const* signals, u32* num_sums, u32* error, T* residual,
                     const T* weight, T* out, int rank, int max_rows, int width, float eps) {
    start_next_kernel();
    wait_for_previous_kernel();
    __shared__ int is_late;
    const u32 wanted = num_sums[blockIdx.x] + 1;
    if (threadIdx.x == 0) is_late = 0;
    __syncthreads();
    if (threadIdx.x < NUM_RANKS) {
        const int peer = threadIdx.x;
        store_release(signals[peer] + rank * max_rows + blockIdx.x, wanted);
        if (!await_signal(signals[rank] + peer * max_rows + blockIdx.x, wanted, error)) {
            atomicCAS(error, 0u, 1u + peer);
            is_late = 1;
        }
        if (peer == 0) num_sums[blockIdx.x] = wanted;
    }
    __syncthreads();
    if (is_late) return;

    const i64 start = static_cast<i64>(blockIdx.x) * width;
    const T* from[NUM_RANKS];
    T* row = residual + start;
    bool aligned = width % Vec<T>::SIZE == 0 && is_aligned_16(residual) && is_aligned_16(weight) && is_aligned_16(out);
#pragma unroll
    for (int r = 0; r < NUM_RANKS; r++) {
        from[r] = parts[r] + start;
        aligned = aligned && is_aligned_16(parts[r]);
    }

    const auto add_vec = [&from, row](int i) {
        Vec<T> more[NUM_RANKS];
#pragma unroll
        for (int r = 0; r < NUM_RANKS; r++) more[r] = load_vec(from[r] + i);
        Vec<T> sum = load_vec(row + i);
#pragma unroll
        for (int j = 0; j < Vec<T>::SIZE; j++) {
            float x = to_float(more[0].at[j]);
#pragma unroll
            for (int r = 1; r < NUM_RANKS; r++) x += to_float(more[r].at[j]);
            sum.at[j] = from_float<T>(to_float(sum.at[j]) + to_float(from_float<T>(x)));
        }
        store_vec(row + i, sum);
        return sum;
    };
    const auto add_one = [&from, row](int i) {
        float x = to_float(from[0][i]);
#pragma unroll
        for (int r = 1; r < NUM_RANKS; r++) x += to_float(from[r][i]);
        row[i] = from_float<T>(to_float(row[i]) + to_float(from_float<T>(x)));
        return row[i];
    };
    norm_row(add_vec, add_one, row, weight, out + start, width, eps, aligned);
}
