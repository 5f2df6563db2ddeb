// normalise_qk: RMSNorm of q and of k over all heads, in place.
//
//   qkv [T, width]: q_width columns of q, k_width of k, then v; q_norm [q_width], k_norm [k_width]
//   grid (T, 2): q, k; block (multiple of 32)
//   reference: NumpyOps.normalise_qk; roofline: 2 T (q_width + k_width) elements
#include "layer/norm_row.cuh"

extern "C" __global__ void __launch_bounds__(1024)
    normalise_qk(T* qkv, const T* q_norm, const T* k_norm, int width, int q_width, int k_width, float eps) {
    start_next_kernel();
    wait_for_previous_kernel();
    const bool is_key = blockIdx.y == 1;
    T* row = qkv + static_cast<i64>(blockIdx.x) * width + (is_key ? q_width : 0);
    const T* weight = is_key ? k_norm : q_norm;
    const int own_width = is_key ? k_width : q_width;
    const bool aligned = width % Vec<T>::SIZE == 0 && q_width % Vec<T>::SIZE == 0 && k_width % Vec<T>::SIZE == 0 &&
                         is_aligned_16(qkv) && is_aligned_16(weight);
    norm_row([row](int i) { return load_vec(row + i); }, [row](int i) { return row[i]; }, row, weight, row, own_width,
             eps, aligned);
}
