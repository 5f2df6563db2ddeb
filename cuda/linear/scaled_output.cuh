// Epilogue of small_m kernels whose weights have scales.
#pragma once

#include "linear/small_m.cuh"

// A warp's output rows; scales (1 without `weight_scale`) and bias of this thread's two.
struct OutputTile {
    Out* out;
    u32 x_scales;    // in shared memory
    int first, end;  // weight rows of this warp
    int num_rows, n_size;
    float scale[2], bias[2];

    __device__ __forceinline__ OutputTile(Out* out, u32 x_scales, const float* weight_scale, const T* add, int tile_row,
                                     int num_rows, int n_size)
        : out(out), x_scales(x_scales), end(min(tile_row + ROWS, n_size)), num_rows(num_rows), n_size(n_size) {
        first = tile_row + threadIdx.x / WARP_SIZE * 16;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int n = first + threadIdx.x % WARP_SIZE / 4 + 8 * half;
            scale[half] = weight_scale == nullptr ? 1.0f : n < end ? __ldg(weight_scale + n) : 0.0f;
            bias[half] = add != nullptr && n < end ? to_float(add[n]) : 0.0f;
        }
    }

    // Stores rows 8 chunk .. 8 chunk + 7 of x.
    __device__ __forceinline__ void store(int chunk, const float (&four)[4]) const {
        const int t = threadIdx.x % 4;
        float by[2] = {1.0f, 1.0f};
        if (SCALE_BYTES > 0)
            asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"  // volatile: all scales at once do not fit in registers
                         : "=f"(by[0]), "=f"(by[1])
                         : "r"(x_scales + (8 * chunk + 2 * t) * 4));
        float low[2], high[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            low[half] = four[2 * half] * scale[half] * by[0] + bias[half];
            high[half] = four[2 * half + 1] * scale[half] * by[1] + bias[half];
        }
#if OUT_FLOAT
        const int m = 8 * chunk + 2 * t;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int n = first + threadIdx.x % WARP_SIZE / 4 + 8 * half;
            if (n >= end) continue;
            if (m < num_rows) out[static_cast<i64>(m) * n_size + n] = low[half];
            if (m + 1 < num_rows) out[static_cast<i64>(m + 1) * n_size + n] = high[half];
        }
#else
        store_pairs(8 * chunk, transpose_matrix(pack_pair(low[0], high[0])),
                    transpose_matrix(pack_pair(low[1], high[1])));
#endif
    }

    // Row g of eight: lane t has elements 2t, 2t + 1, 2t + 8, 2t + 9 of sixteen.
    __device__ __forceinline__ void store_pairs(int row_of_x, u32 near, u32 far) const {
        const int lane = threadIdx.x % WARP_SIZE, g = lane / 4, t = lane % 4, m = row_of_x + g;
        Out* row = out + static_cast<i64>(m) * n_size + first;
        if (first + 16 <= end && n_size % 4 == 0) {  // lane t gets 4t .. 4t + 3: four lanes write 32 bytes
            const int from = lane / 4 * 4 + t % 2 * 2;
            const u32 even[2] = {__shfl_sync(FULL_WARP, near, from), __shfl_sync(FULL_WARP, near, from + 1)};
            const u32 odd[2] = {__shfl_sync(FULL_WARP, far, from), __shfl_sync(FULL_WARP, far, from + 1)};
            const uint2 own = t < 2 ? make_uint2(even[0], even[1]) : make_uint2(odd[0], odd[1]);
            if (m < num_rows) *reinterpret_cast<uint2*>(row + 4 * t) = own;
            return;
        }
        if (m >= num_rows) return;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 pair = half == 0 ? near : far;
            const Out* two = reinterpret_cast<const Out*>(&pair);
            const int n = 8 * half + 2 * t;
            if (first + n < end) row[n] = two[0];
            if (first + n + 1 < end) row[n + 1] = two[1];
        }
    }
};

