// gather_ranks: all-gather, out [T, width] = parts [T, n] of ranks 0, copies, 2 copies, ... side by side.
//
//   width <= n * NUM_RANKS / copies
//   grid (at most MAX_BLOCKS), block (multiple of 32, at least NUM_RANKS)
//   reference: NumpyCollectives.gather; roofline: T width elements over links; not measured
#include "group/signals.cuh"

template <int UNIT>
__device__ __forceinline__ void gather_units(const PerRank<const T>& parts, T* out, int num_rows, int n, int copies,
                                             int width) {
    const int units = width / UNIT;
    const i64 end = static_cast<i64>(num_rows) * units, stride = static_cast<i64>(gridDim.x) * blockDim.x;
    for (i64 place = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; place < end; place += stride) {
        const i64 row = place / units;
        const int column = static_cast<int>(place - row * units) * UNIT;
        const int part = column / n;
        const T* from = parts.at[part * copies] + row * n + (column - part * n);
        T* to = out + row * width + column;
        if constexpr (UNIT == 1)
            *to = load_rank_element(from);
        else
            store_vec(to, load_rank_vec(from));
    }
}

extern "C" __global__ void __launch_bounds__(1024)
    gather_ranks(const __grid_constant__ Group group, const __grid_constant__ PerRank<const T> parts, T* out,
                 int num_rows, int n, int copies, int width) {
    start_next_kernel();
    wait_for_previous_kernel();
    bool aligned = n % Vec<T>::SIZE == 0 && width % Vec<T>::SIZE == 0 && is_aligned_16(out);
#pragma unroll
    for (int r = 0; r < NUM_RANKS; r++) aligned = aligned && is_aligned_16(parts.at[r]);
    Barrier barrier(group);
    if (!barrier.meet()) return;
    if (aligned)
        gather_units<Vec<T>::SIZE>(parts, out, num_rows, n, copies, width);
    else
        gather_units<1>(parts, out, num_rows, n, copies, width);
    barrier.meet();
    barrier.close();
}
