// sum_ranks: all-reduce, out[i] = sum over ranks of parts[r][i], in rank order in float.
//
//   parts, outs [NUM_RANKS] of [size]
//   STEPS 1: each rank reads all parts; 2: each sums its share, then reads its peers'; 0: parts are own memory (NCCL)
//   grid (at most MAX_BLOCKS), block (multiple of 32, at least NUM_RANKS)
//   reference: NumpyCollectives.sum
//   roofline: (NUM_RANKS - 1) size elements over a link, with STEPS 2 times 2 / NUM_RANKS; not measured
#include "group/signals.cuh"

#ifndef STEPS
#error "define STEPS: 0, 1 or 2"
#endif

template <int UNIT>
struct Elements {
    const PerRank<const T>& parts;

    __device__ __forceinline__ void sum(T* out, i64 unit) const {
        if constexpr (UNIT == 1) {
            float x = to_float(load_rank_element(parts.at[0] + unit));
#pragma unroll
            for (int r = 1; r < NUM_RANKS; r++) x += to_float(load_rank_element(parts.at[r] + unit));
            out[unit] = from_float<T>(x);
        } else {
            Vec<T> each[NUM_RANKS], sum;
#pragma unroll
            for (int r = 0; r < NUM_RANKS; r++) each[r] = load_rank_vec(parts.at[r] + unit * UNIT);
#pragma unroll
            for (int j = 0; j < UNIT; j++) {
                float x = to_float(each[0].at[j]);
#pragma unroll
                for (int r = 1; r < NUM_RANKS; r++) x += to_float(each[r].at[j]);
                sum.at[j] = from_float<T>(x);
            }
            store_vec(out + unit * UNIT, sum);
        }
    }

    __device__ __forceinline__ void copy(const T* from, T* out, i64 unit) const {
        if constexpr (UNIT == 1) {
            out[unit] = load_rank_element(from + unit);
        } else {
            store_vec(out + unit * UNIT, load_rank_vec(from + unit * UNIT));
        }
    }
};

// This thread's units of [begin, end), the same in both steps.
template <typename Visit>
__device__ __forceinline__ void for_each_unit(i64 begin, i64 end, Visit visit) {
    const i64 stride = static_cast<i64>(gridDim.x) * blockDim.x;
    for (i64 unit = begin + static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; unit < end; unit += stride)
        visit(unit);
}

template <int UNIT>
__device__ __forceinline__ void sum_units(const Group& group, const PerRank<const T>& parts, const PerRank<T>& outs,
                                          i64 size) {
    const Elements<UNIT> elements = {parts};
    T* out = outs.at[group.rank];
    const i64 num_units = size / UNIT;
#if STEPS == 0
    for_each_unit(0, num_units, [&](i64 unit) { elements.sum(out, unit); });
#else
    Barrier barrier(group);
    if (!barrier.meet()) return;
#if STEPS == 1
    for_each_unit(0, num_units, [&](i64 unit) { elements.sum(out, unit); });
#else
    const i64 share = (num_units + NUM_RANKS - 1) / NUM_RANKS;
    const i64 begin = group.rank * share;
    for_each_unit(begin, min(begin + share, num_units), [&](i64 unit) { elements.sum(out, unit); });
    if (!barrier.meet()) return;
#pragma unroll
    for (int n = 1; n < NUM_RANKS; n++) {
        const int peer = (group.rank + n) % NUM_RANKS;
        const T* from = outs.at[peer];
        const i64 first = peer * share;
        for_each_unit(first, min(first + share, num_units), [&](i64 unit) { elements.copy(from, out, unit); });
    }
#endif
    barrier.meet();
    barrier.close();
#endif
}

extern "C" __global__ void __launch_bounds__(1024)
    sum_ranks(const __grid_constant__ Group group, const __grid_constant__ PerRank<const T> parts,
              const __grid_constant__ PerRank<T> outs, i64 size) {
    start_next_kernel();
    wait_for_previous_kernel();
    bool aligned = size % Vec<T>::SIZE == 0;
#pragma unroll
    for (int r = 0; r < NUM_RANKS; r++) aligned = aligned && is_aligned_16(parts.at[r]) && is_aligned_16(outs.at[r]);
    if (aligned)
        sum_units<Vec<T>::SIZE>(group, parts, outs, size);
    else
        sum_units<1>(group, parts, outs, size);
}
