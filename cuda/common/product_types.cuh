// Types of tensor-core products: 16-bit operands; float32 results with OUT_FLOAT.
#pragma once

#include "common/types.cuh"

#if QUIRE_DTYPE == 0
#error "the tensor cores take float16 and bfloat16"
#endif
#if OUT_FLOAT
using Out = float;
#else
using Out = T;
#endif
