// Types of products on the tensor cores: operands of 16 bits; with OUT_FLOAT results are float32.
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
