// find_nonfinite: found[0] = 1 if an element of x is NaN or infinite.
//
//   x [count], found int32 [1]
//   grid (a few blocks an SM), block (256)
//   reference: NumpyOps.find_nonfinite; roofline: x read once
#include "common/types.cuh"

__device__ __forceinline__ bool is_finite(T x) { return fabsf(to_float(x)) < positive_infinity(); }

extern "C" __global__ void __launch_bounds__(256) find_nonfinite(const T* x, int* found, i64 count) {
    const i64 first = blockIdx.x * static_cast<i64>(blockDim.x) + threadIdx.x;
    const i64 stride = gridDim.x * static_cast<i64>(blockDim.x);
    const i64 num_vecs = is_aligned_16(x) ? count / Vec<T>::SIZE : 0;
    bool all_finite = true;
    for (i64 vec = first; vec < num_vecs; vec += stride) {
        const Vec<T> values = load_vec(x + vec * Vec<T>::SIZE);
#pragma unroll
        for (int i = 0; i < Vec<T>::SIZE; ++i) all_finite &= is_finite(values.at[i]);
    }
    for (i64 i = num_vecs * Vec<T>::SIZE + first; i < count; i += stride) all_finite &= is_finite(x[i]);
    if (!all_finite) *found = 1;
}
