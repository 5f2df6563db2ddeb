// Hopper instructions (sm_90a): mbarrier, TMA, cluster messages, wgmma. Warp w of a warpgroup holds rows 16 w .. 16 w +
// 15 in the fragments of mma.cuh.
#pragma once

#include "common/mma.cuh"
#include "common/types.cuh"

#if F16_PRODUCTS
#define WGMMA_TYPES "f16.f16"
#else
#define WGMMA_TYPES "bf16.bf16"
#endif

constexpr int WARPGROUP_SIZE = 128;

// CUtensorMap, made by the host and passed as a __grid_constant__.
struct alignas(64) TensorMap {
    unsigned char opaque[128];
};

// A phase ends when all arrivals and expected bytes are in; the first has parity 0.
__device__ __forceinline__ void make_barrier(u32 barrier, int num_arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(barrier), "r"(num_arrivals) : "memory");
}

// Makes barriers visible to TMA.
__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(barrier) : "memory");
}

__device__ __forceinline__ void arrive_expecting(u32 barrier, u32 num_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(barrier), "r"(num_bytes) : "memory");
}

__device__ __forceinline__ void wait_for(u32 barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "retry:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra retry;\n"
        "}\n"
        :
        : "r"(barrier), "r"(parity)
        : "memory");
}

// True in one lane. Unlike with lane == 0, the compiler emits no loop around copies.
__device__ __forceinline__ bool is_elected() {
    u32 is_it;
    asm volatile(
        "{\n"
        ".reg .pred chosen;\n"
        "elect.sync _|chosen, 0xffffffff;\n"
        "selp.u32 %0, 1, 0, chosen;\n"
        "}\n"
        : "=r"(is_it));
    return is_it != 0;
}

// Coordinates in elements; elements outside the map become zeros.
__device__ __forceinline__ void copy_box(u32 to_shared, const TensorMap& map, int x, int y, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
        :
        : "r"(to_shared), "l"(&map), "r"(x), "r"(y), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void copy_box(u32 to_shared, const TensorMap& map, int x, int y, int z, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
        :
        : "r"(to_shared), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ u64 policy_of_read_again() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ void copy_box(u32 to_shared, const TensorMap& map, int x, int y, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%2, %3}], [%4], %5;"
        :
        : "r"(to_shared), "l"(&map), "r"(x), "r"(y), "r"(barrier), "l"(policy)
        : "memory");
}

__device__ __forceinline__ void copy_box(u32 to_shared, const TensorMap& map, int x, int y, int z, int w, u32 barrier,
                                         u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%2, %3, %4, %5}], [%6], %7;"
        :
        : "r"(to_shared), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier), "l"(policy)
        : "memory");
}

__device__ __forceinline__ void copy_bytes(u32 to_shared, const void* from, int num_bytes, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
        :
        : "r"(to_shared), "l"(from), "r"(num_bytes), "r"(barrier), "l"(policy)
        : "memory");
}

__device__ __forceinline__ void copy_bytes(u32 to_shared, const void* from, int num_bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :
                 : "r"(to_shared), "l"(from), "r"(num_bytes), "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" : : "l"(&map) : "memory");
}

// Maps an own shared address to the cluster's block `rank`.
__device__ __forceinline__ u32 address_in(int rank, u32 address) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

// Sends to another block of the cluster, whose mbarrier counts the bytes; addresses from `address_in`.
__device__ __forceinline__ void send(u32 to, const float (&four)[4], u32 barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                 :
                 : "r"(to), "f"(four[0]), "f"(four[1]), "f"(four[2]), "f"(four[3]), "r"(barrier)
                 : "memory");
}

// Called after waiting for the barrier.
__device__ __forceinline__ void receive(float (&four)[4], u32 from) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(four[0]), "=f"(four[1]), "=f"(four[2]), "=f"(four[3])
                 : "r"(from)
                 : "memory");
}

// `wait_for` for data from other blocks of the cluster.
__device__ __forceinline__ void wait_for_sent(u32 barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "retry:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra retry;\n"
        "}\n"
        :
        : "r"(barrier), "r"(parity)
        : "memory");
}

// A cluster barrier in two steps; orders no memory but published barriers.
__device__ __forceinline__ void arrive_at_cluster() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" : : : "memory");
}

__device__ __forceinline__ void wait_for_cluster() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" : : : "memory");
}

// Orders this thread's shared stores before reads by the tensor cores.
__device__ __forceinline__ void publish_stores() { asm volatile("fence.proxy.async.shared::cta;" : : : "memory"); }

// Named barrier among warps of a block; 0 is __syncthreads.
__device__ __forceinline__ void sync_named_barrier(int number, int num_threads) {
    asm volatile("bar.sync %0, %1;" : : "r"(number), "r"(num_threads) : "memory");
}

template <int REGISTERS>
__device__ __forceinline__ void give_up_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(REGISTERS));
}

template <int REGISTERS>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(REGISTERS));
}

// wgmma descriptor of 128-byte rows in the 128-byte swizzle (16-byte chunks XORed with the row). `repeat_bytes`: stride
// between columns of 64 if rows are the summed dimension.
__device__ __forceinline__ u64 operand(u32 address, u32 repeat_bytes) {
    return (1ull << 62) | (static_cast<u64>(1024 >> 4) << 32) | (static_cast<u64>(repeat_bytes >> 4) << 16) |
           ((address & 0x3ffff) >> 4);
}

// Orders register writes before the first product.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" : : : "memory"); }

__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory"); }

// Keeps uses of registers from moving across waits and fences.
template <int SIZE>
__device__ __forceinline__ void pin(float (&d)[SIZE]) {
#pragma unroll
    for (int i = 0; i < SIZE; ++i) asm volatile("" : "+f"(d[i]) : : "memory");
}

// Waits for all but the last `PENDING` groups of products; `d` is among those done.
template <int PENDING, int SIZE>
__device__ __forceinline__ void wait_for_products(float (&d)[SIZE]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(PENDING) : "memory");
    pin(d);
}

// Accumulators of N columns as asm operands: registers d[0] .. d[N / 2 - 1], and their placeholders.
#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D_16(i) D4(i), D4(i + 4), D4(i + 8), D4(i + 12)
#define D16 D4(0), D4(4)
#define D32 D_16(0)
#define D64 D32, D_16(16)
#define D96 D64, D_16(32)
#define D128 D96, D_16(48)
#define D192 D128, D_16(64), D_16(80)
#define D256 D192, D_16(96), D_16(112)
#define SUMS16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define SUMS32 SUMS16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define SUMS64 SUMS32 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SUMS96 SUMS64 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define SUMS128 SUMS96 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SUMS192                                                                                \
    SUMS128 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
            ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define SUMS256                                                                                            \
    SUMS192 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
            ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// d += a b, 64 x n x k; with `accumulate` 0 d = a b. `operands`: placeholders of a and b, then flags.
#define WGMMA(n, k, types, accumulate, operands, ...)                                                      \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " accumulate ", 0;\n"                                   \
                 "wgmma.mma_async.sync.aligned.m64n" #n k ".f32." types " {" SUMS##n "}, " operands ";\n}" \
                 : D##n                                                                                    \
                 : __VA_ARGS__)

// 16-bit a and b in shared memory, both K-major.
template <int ACCUMULATE>
__device__ __forceinline__ void multiply(float (&d)[64], u64 a, u64 b) {
    WGMMA(128, "k16", WGMMA_TYPES, "%66", "%64, %65, p, 1, 1, 0, 0", "l"(a), "l"(b), "n"(ACCUMULATE));
}

#define WGMMA_SHARED(n, places)                                                      \
    __device__ __forceinline__ void multiply_add(float (&d)[n / 2], u64 a, u64 b) {  \
        WGMMA(n, "k16", WGMMA_TYPES, "1", places ", p, 1, 1, 0, 0", "l"(a), "l"(b)); \
    }
WGMMA_SHARED(32, "%16, %17")
WGMMA_SHARED(64, "%32, %33")
WGMMA_SHARED(96, "%48, %49")
WGMMA_SHARED(128, "%64, %65")

// 16-bit a in registers, b in shared memory: MN-major if transposed ("1"), else K-major ("0").
#define WGMMA_REGISTERS(name, n, places, transposed)                                                        \
    __device__ __forceinline__ void name(float (&d)[n / 2], const u32 (&a)[4], u64 b) {                     \
        WGMMA(n, "k16", WGMMA_TYPES, "1", places ", p, 1, 1, " transposed, "r"(a[0]), "r"(a[1]), "r"(a[2]), \
              "r"(a[3]), "l"(b));                                                                           \
    }
WGMMA_REGISTERS(multiply_add_transposed, 64, "{%32, %33, %34, %35}, %36", "1")
WGMMA_REGISTERS(multiply_add_transposed, 128, "{%64, %65, %66, %67}, %68", "1")

// e4m3 a and b in shared memory, both K-major; accumulates about 14 bits.
#define WGMMA_E4M3(n, places)                                                            \
    __device__ __forceinline__ void multiply_add_e4m3(float (&d)[n / 2], u64 a, u64 b) { \
        WGMMA(n, "k32", "e4m3.e4m3", "1", places ", p, 1, 1", "l"(a), "l"(b));           \
    }
WGMMA_E4M3(16, "%8, %9")
WGMMA_E4M3(32, "%16, %17")
WGMMA_E4M3(64, "%32, %33")
WGMMA_E4M3(96, "%48, %49")
WGMMA_E4M3(128, "%64, %65")
WGMMA_E4M3(192, "%96, %97")
WGMMA_E4M3(256, "%128, %129")
