// draft_input: out[t] = [rms_norm(table[ids[t]]) ; rms_norm(hidden[t])], the input of an EAGLE-3 head.
//
//   table [N, H], ids int32 [T] (outside 0..N-1: zeros), hidden [T, H], weights [H], out [T, 2 H]
//   grid (T, 2): halves; block (multiple of 32)
//   reference: NumpyOps.draft_input; roofline: 4 T H elements
#include "layer/norm_row.cuh"

extern "C" __global__ void __launch_bounds__(1024)
    draft_input(const T* table, const int* ids, const T* hidden, const T* table_weight, const T* hidden_weight, T* out,
                int num_rows, int width, float eps) {
    start_next_kernel();
    wait_for_previous_kernel();
    const bool is_hidden = blockIdx.y == 1;
    const T* row = hidden + static_cast<i64>(blockIdx.x) * width;
    const T* weight = is_hidden ? hidden_weight : table_weight;
    T* half = out + (2 * static_cast<i64>(blockIdx.x) + blockIdx.y) * width;
    if (!is_hidden) {
        const int id = ids[blockIdx.x];
        if (id < 0 || id >= num_rows) {
            for (int i = threadIdx.x; i < width; i += blockDim.x) half[i] = from_float<T>(0.0f);
            return;
        }
        row = table + static_cast<i64>(id) * width;
    }
    const bool aligned = width % Vec<T>::SIZE == 0 && is_aligned_16(row) && is_aligned_16(weight) && is_aligned_16(out);
    norm_row([row](int i) { return load_vec(row + i); }, [row](int i) { return row[i]; }, row, weight, half, width, eps,
             aligned);
}
