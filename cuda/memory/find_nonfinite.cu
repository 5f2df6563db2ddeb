// find_nonfinite: found[0] = 1 if an element of x is NaN or infinite.
//
//   x [count] of T, with E4M3 the bits of e4m3, which has no infinity; found int32 [1]
//   grid (a few blocks per SM), block (256)
//   reference: NumpyOps.find_nonfinite; roofline: x read once
#include "common/types.cuh"

#ifndef E4M3
#define E4M3 0
#endif

#if E4M3
using Element = unsigned char;
using Word = u32;
// NaN is 0x7f without the sign: only then does adding 1 set the sign bit.
__device__ __forceinline__ bool is_finite(u32 bits) { return (((bits & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u) == 0; }
#else
using Element = T;
using Word = T;
__device__ __forceinline__ bool is_finite(T x) { return fabsf(to_float(x)) < positive_infinity(); }
#endif

extern "C" __global__ void __launch_bounds__(256) find_nonfinite(const Element* x, int* found, i64 count) {
    const i64 first = blockIdx.x * static_cast<i64>(blockDim.x) + threadIdx.x;
    const i64 stride = gridDim.x * static_cast<i64>(blockDim.x);
    const i64 num_vecs = is_aligned_16(x) ? count / Vec<Element>::SIZE : 0;
    bool all_finite = true;
    for (i64 vec = first; vec < num_vecs; vec += stride) {
        const Vec<Word> values = load_vec(reinterpret_cast<const Word*>(x + vec * Vec<Element>::SIZE));
#pragma unroll
        for (int i = 0; i < Vec<Word>::SIZE; ++i) all_finite &= is_finite(values.at[i]);
    }
    for (i64 i = num_vecs * Vec<Element>::SIZE + first; i < count; i += stride) all_finite &= is_finite(x[i]);
    if (!all_finite) *found = 1;
}
