// add_bias: out[m, n] += bias[n], where cuBLASLt cannot.
//
//   bias [N]; out [M, N], float32 with OUT_FLOAT
//   grid (M, ceil(N / 256)), block (256)
//   reference: NumpyOps.linear; roofline: 2 M N elements
#include "common/types.cuh"

#if OUT_FLOAT
using Out = float;
#else
using Out = T;
#endif

extern "C" __global__ void __launch_bounds__(256) add_bias(Out* out, const T* bias, int width) {
    start_next_kernel();
    wait_for_previous_kernel();
    const int n = blockIdx.y * blockDim.x + threadIdx.x;
    if (n >= width) return;
    Out* at = out + static_cast<i64>(blockIdx.x) * width + n;
    *at = from_float<Out>(to_float(*at) + to_float(bias[n]));
}
