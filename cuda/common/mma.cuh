// mma.sync, ldmatrix and cp.async from sm_80 on, in PTX: mma.h does not compile under NVRTC.
//
// Fragments, g = lane / 4, t = lane % 4 (two 16-bit elements per register, low half first):
//   A, 16 x 16   a[0] = A[g][2t, 2t+1]   a[1] = A[g+8][2t, 2t+1]   a[2] = A[g][2t+8, 2t+9]   a[3] = A[g+8][2t+8, 2t+9]
//   B, 16 x 8    b0 = B[2t, 2t+1][g]     b1 = B[2t+8, 2t+9][g]
//   C, 16 x 8    c[0], c[1] = C[g][2t, 2t+1]     c[2], c[3] = C[g+8][2t, 2t+1]
#pragma once

#include "common/types.cuh"

// Operands are T; float16 with an e4m3 cache: exact and cheapest to widen to.
#ifndef QUIRE_KV_FP8
#define QUIRE_KV_FP8 0
#endif
#define F16_PRODUCTS (QUIRE_DTYPE == 1 || QUIRE_KV_FP8)

// sum += a b, in float.
__device__ __forceinline__ void mma_16x8x16(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if F16_PRODUCTS
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// sum += a b over 32 elements of K. A lane holds 8 adjacent ones of rows g (`near`) and g + 8 (`far`) of a and of
// column g of b: an mma takes K in any order that a and b share.
__device__ __forceinline__ void mma_16x8x32(float (&sum)[4], uint4 near, uint4 far, uint4 b) {
    const u32 first[4] = {near.x, far.x, near.y, far.y};
    const u32 second[4] = {near.z, far.z, near.w, far.w};
    mma_16x8x16(sum, first, b.x, b.y);
    mma_16x8x16(sum, second, b.z, b.w);
}

// Byte offset of a vector in rows of VECS. Odd rows swap halves of 128 bytes: four vectors of two rows hit all banks.
template <int VECS>
__device__ __forceinline__ int row_pair_offset(int row, int vec) {
    return (row * VECS + (vec ^ (row % 2 * 4))) * 16;
}

__device__ __forceinline__ uint4 load_shared(const void* from) { return *static_cast<const uint4*>(from); }

// Lane 8 i + r gives the address of row r (16 bytes) of matrix i; register i becomes matrix[i][g][2t, 2t+1].
__device__ __forceinline__ void load_matrices(u32 (&matrix)[4], u32 row_address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrix[0]), "=r"(matrix[1]), "=r"(matrix[2]), "=r"(matrix[3])
                 : "r"(row_address)
                 : "memory");
}

// Transposed: register i becomes matrix[i][2t, 2t+1][g].
__device__ __forceinline__ void load_matrices_transposed(u32 (&matrix)[4], u32 row_address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrix[0]), "=r"(matrix[1]), "=r"(matrix[2]), "=r"(matrix[3])
                 : "r"(row_address)
                 : "memory");
}

__device__ __forceinline__ u32 transpose_matrix(u32 matrix) {
    u32 transposed;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(matrix));
    return transposed;
}

// Rounds to T, `low` in the low half.
__device__ __forceinline__ u32 pack_pair(float low, float high) {
    u32 pair;
#if QUIRE_DTYPE == 1
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#endif
    return pair;
}

// Rounds to the operands' type.
__device__ __forceinline__ u32 pack_operand(float low, float high) {
#if F16_PRODUCTS
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return pack_pair(low, high);
#endif
}

__device__ __forceinline__ float2 unpack_pair(u32 pair) {
#if QUIRE_DTYPE == 1
    const __half2 two = *reinterpret_cast<const __half2*>(&pair);
    return __half22float2(two);
#else
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
#endif
}

// 2^x to about 2 ulp; exactly 0 for minus infinity.
__device__ __forceinline__ float exp2_approx(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}

__device__ __forceinline__ u32 shared_address(const void* in_shared) {
    return static_cast<u32>(__cvta_generic_to_shared(in_shared));
}

// Bypasses L1; if not `wanted`, writes zeros and reads nothing.
__device__ __forceinline__ void copy_async_16(u32 to_shared, const void* from_global, bool wanted) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                 :
                 : "r"(to_shared), "l"(from_global), "r"(wanted ? 16 : 0)
                 : "memory");
}

// L2 evict-first, for data read once.
__device__ __forceinline__ u64 policy_of_read_once() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ void copy_async_16(u32 to_shared, const void* from_global, u64 policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;"
                 :
                 : "r"(to_shared), "l"(from_global), "l"(policy)
                 : "memory");
}

__device__ __forceinline__ void copy_streamed_16(u32 to_shared, const void* from_global, bool wanted) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;"
                 :
                 : "r"(to_shared), "l"(from_global), "r"(wanted ? 16 : 0), "l"(policy_of_read_once())
                 : "memory");
}

__device__ __forceinline__ void copy_async_4(u32 to_shared, const void* from_global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" : : "r"(to_shared), "l"(from_global) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" : : : "memory"); }

// Waits for all but this thread's last `PENDING` groups; other threads' copies need a barrier.
template <int PENDING>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" : : "n"(PENDING) : "memory");
}
