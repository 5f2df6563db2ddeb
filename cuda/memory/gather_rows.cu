// gather_rows: out[t] = table[ids[t]]; zeros for an id outside 0..N-1.
//
//   table [N, H], ids int32 [T], out [T, H]
//   grid (T), block (256)
//   reference: NumpyOps.gather_rows; roofline: 2 T H elements
#include "common/types.cuh"

extern "C" __global__ void __launch_bounds__(256)
    gather_rows(const T* table, const int* ids, T* out, int num_rows, int width) {
    start_next_kernel();
    wait_for_previous_kernel();
    const int id = ids[blockIdx.x];
    const bool known = id >= 0 && id < num_rows;
    const T* from = table + static_cast<i64>(known ? id : 0) * width;
    T* to = out + static_cast<i64>(blockIdx.x) * width;

    if (width % Vec<T>::SIZE == 0 && is_aligned_16(table) && is_aligned_16(out)) {
        for (int i = threadIdx.x * Vec<T>::SIZE; i < width; i += blockDim.x * Vec<T>::SIZE)
            store_vec(to + i, known ? load_vec(from + i) : Vec<T>{});
    } else {
        for (int i = threadIdx.x; i < width; i += blockDim.x) to[i] = known ? from[i] : from_float<T>(0.0f);
    }
}
