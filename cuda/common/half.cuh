// The part of cuda_fp16.h and cuda_bf16.h that kernels use, with the same instructions, from sm_90 on. Those headers
// take two thirds of NVRTC's front end, which runs for one module at a time.
#pragma once

struct alignas(2) __half {
    unsigned short bits;
};
struct alignas(4) __half2 {
    unsigned int bits;
};
struct alignas(2) __nv_bfloat16 {
    unsigned short bits;
};
struct alignas(4) __nv_bfloat162 {
    unsigned int bits;
};

__device__ __forceinline__ float __half2float(__half x) {
    float out;
    asm("{  cvt.f32.f16 %0, %1;}\n" : "=f"(out) : "h"(x.bits));
    return out;
}

__device__ __forceinline__ float __bfloat162float(__nv_bfloat16 x) {
    float out;
    asm("{ cvt.f32.bf16 %0, %1;}\n" : "=f"(out) : "h"(x.bits));
    return out;
}

__device__ __forceinline__ float2 __half22float2(__half2 x) {
    float2 out;
    asm("{.reg .f16 low,high;\n  mov.b32 {low,high},%1;\n  cvt.f32.f16 %0, low;}\n" : "=f"(out.x) : "r"(x.bits));
    asm("{.reg .f16 low,high;\n  mov.b32 {low,high},%1;\n  cvt.f32.f16 %0, high;}\n" : "=f"(out.y) : "r"(x.bits));
    return out;
}

__device__ __forceinline__ __half __float2half_rn(float x) {
    __half out;
    asm("{  cvt.rn.f16.f32 %0, %1;}\n" : "=h"(out.bits) : "f"(x));
    return out;
}

__device__ __forceinline__ __nv_bfloat16 __float2bfloat16_rn(float x) {
    __nv_bfloat16 out;
    asm("{  cvt.rn.bf16.f32 %0, %1;}\n" : "=h"(out.bits) : "f"(x));
    return out;
}

__device__ __forceinline__ __half2 __float2half2_rn(float x) {
    __half2 out;
    asm("{.reg .f16 low;\n  cvt.rn.f16.f32 low, %1;\n  mov.b32 %0, {low,low};}\n" : "=r"(out.bits) : "f"(x));
    return out;
}

__device__ __forceinline__ __nv_bfloat162 __float2bfloat162_rn(float x) {
    __nv_bfloat162 out;
    asm("{.reg .b16 low;\n  cvt.rn.bf16.f32 low, %1;\n  mov.b32 %0, {low,low};}\n" : "=r"(out.bits) : "f"(x));
    return out;
}

__device__ __forceinline__ __half2 __hmul2(__half2 a, __half2 b) {
    __half2 out;
    asm("{mul.f16x2 %0,%1,%2;\n}" : "=r"(out.bits) : "r"(a.bits), "r"(b.bits));
    return out;
}

__device__ __forceinline__ __nv_bfloat162 __hmul2(__nv_bfloat162 a, __nv_bfloat162 b) {
    __nv_bfloat162 out;
    asm("{ mul.bf16x2 %0,%1,%2; }\n" : "=r"(out.bits) : "r"(a.bits), "r"(b.bits));
    return out;
}

__device__ __forceinline__ __half2 __hsub2(__half2 a, __half2 b) {
    __half2 out;
    asm("{sub.f16x2 %0,%1,%2;\n}" : "=r"(out.bits) : "r"(a.bits), "r"(b.bits));
    return out;
}

__device__ __forceinline__ __nv_bfloat162 __hsub2(__nv_bfloat162 a, __nv_bfloat162 b) {
    __nv_bfloat162 out;
    asm("{ sub.bf16x2 %0,%1,%2; }\n" : "=r"(out.bits) : "r"(a.bits), "r"(b.bits));
    return out;
}

__device__ __forceinline__ __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
    __half2 out;
    asm("{fma.rn.f16x2 %0,%1,%2,%3;\n}" : "=r"(out.bits) : "r"(a.bits), "r"(b.bits), "r"(c.bits));
    return out;
}

__device__ __forceinline__ __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
    __nv_bfloat162 out;
    asm("{fma.rn.bf16x2 %0,%1,%2,%3;\n}" : "=r"(out.bits) : "r"(a.bits), "r"(b.bits), "r"(c.bits));
    return out;
}
