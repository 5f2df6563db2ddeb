// place_columns: out[t, first + i] = x[t, i].
//
//   x [T, H], out [T, W]; grid (T), block (256)
//   reference: NumpyOps.place_columns; roofline: 2 T H elements
#include "common/types.cuh"

extern "C" __global__ void __launch_bounds__(256)
    place_columns(const T* x, T* out, int width, int out_width, int first) {
    start_next_kernel();
    wait_for_previous_kernel();
    const T* from = x + static_cast<i64>(blockIdx.x) * width;
    T* to = out + static_cast<i64>(blockIdx.x) * out_width + first;
    const bool is_whole = width % Vec<T>::SIZE == 0 && out_width % Vec<T>::SIZE == 0 && first % Vec<T>::SIZE == 0;
    if (is_whole && is_aligned_16(x) && is_aligned_16(out)) {
        for (int i = threadIdx.x * Vec<T>::SIZE; i < width; i += blockDim.x * Vec<T>::SIZE)
            store_vec(to + i, load_vec(from + i));
    } else {
        for (int i = threadIdx.x; i < width; i += blockDim.x) to[i] = from[i];
    }
}
