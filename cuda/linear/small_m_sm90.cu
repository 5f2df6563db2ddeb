// small_m_sm90: out = x @ weight.T + bias on Hopper, for more rows than gemv.
//
//   x [M, K], weight [N, K], bias [N] or null, out [M, N]; COLS 32, 64, 96, 128; K a multiple of 8
//   grid: at most SPLIT blocks per tile; block THREADS
//   reference: NumpyOps.linear
//   roofline: N K elements; 0.9 of copy bandwidth from 100 MB
#define WEIGHT_ELEMENTS 64
#define X_BOXES 1
#define SCALE_BYTES 0
#include "linear/small_m.cuh"

// A warp's output rows; bias of this thread's two.
struct OutputTile {
    Out* out;
    int first, end;  // weight rows of this warp
    int num_rows, n_size;
    float bias[2];

    __device__ __forceinline__ OutputTile(Out* out, const T* add, int tile_row, int num_rows, int n_size)
        : out(out), end(min(tile_row + ROWS, n_size)), num_rows(num_rows), n_size(n_size) {
        first = tile_row + threadIdx.x / WARP_SIZE * 16;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = first + 8 * half + threadIdx.x % WARP_SIZE / 4;
            bias[half] = add != nullptr && row < end ? to_float(add[row]) : 0.0f;
        }
    }

    // Stores rows 8 chunk .. 8 chunk + 7 of x; transposed if 16 bits, for adjacent stores.
    __device__ __forceinline__ void store(int chunk, const float (&four)[4]) const {
        const int g = threadIdx.x % WARP_SIZE / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float low = four[2 * half] + bias[half], high = four[2 * half + 1] + bias[half];
            const int row = first + 8 * half;
#if OUT_FLOAT
            const int m = 8 * chunk + 2 * t, n = row + g;
            if (n >= end) continue;
            if (m < num_rows) out[static_cast<i64>(m) * n_size + n] = low;
            if (m + 1 < num_rows) out[static_cast<i64>(m + 1) * n_size + n] = high;
#else
            const u32 pair = transpose_matrix(pack_pair(low, high));
            const int m = 8 * chunk + g, n = row + 2 * t;
            if (m >= num_rows || n >= end) continue;
            T* to = out + static_cast<i64>(m) * n_size + n;
            if (n_size % 2 == 0) {
                *reinterpret_cast<u32*>(to) = pair;
            } else {
                const T* two = reinterpret_cast<const T*>(&pair);
                to[0] = two[0];
                if (n + 1 < end) to[1] = two[1];
            }
#endif
        }
    }
};

struct Stage {
    static __device__ __forceinline__ void multiply(Sums& sum, u32 weights, u32 x) {
#pragma unroll
        for (int k = 0; k < 128; k += 32) multiply_add(sum, operand(weights + k, 0), operand(x + k, 0));
    }
};

extern "C" __global__ void SMALL_M_CLUSTER __launch_bounds__(THREADS, 1)
    small_m_sm90(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap weight_map, const T* bias,
                 Out* out, int num_rows, int n_size, int k_size) {
    extern __shared__ unsigned char memory[];
    const Shared shared{(shared_address(memory) + 1023) / 1024 * 1024};
    const BlockWork work(n_size, k_size);
    if (!begin_block(shared, Producer{shared, work, weight_map, x_map, policy_of_read_once()})) return;
    for (int tile = 0; tile < work.num_tiles; ++tile) {
        Sums sum;
        sum_tile<Stage>(sum, shared, work, tile * work.num_spans);
        const OutputTile output(out, bias, work.first_row(tile), num_rows, n_size);
        store(sum, output, shared, work.split);
    }
}
