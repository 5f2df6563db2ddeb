// rope_kv_write: norms q and k per head if weights are given, rotates them, writes k and v to the paged cache, returns
// q.
//
//   qkv [T, (Hq + 2 Hkv) * D]; cos, sin float32 [max_len, D / 2]; positions int32 [T]; slots int64 [T]
//   kv [num_blocks, L, 2, Hkv, B, D], with QUIRE_KV_FP8 e4m3 of value / kv_scales float32 [L, 2, Hkv]
//   q_norm, k_norm [D] or null; q_out [T, Hq, D]; arrays aligned to 16 bytes; T * (Hq + 2 Hkv) * TEAM below 2^31
//   grid (ceil(T * (Hq + 2 Hkv) / (256 / TEAM))), block (256): TEAM lanes a head, each 16 bytes of both halves
//   reference: NumpyOps.rope_kv_write
//   A slot outside the cache or a position outside the table writes no kv; such a position gives q of zeros.
//   roofline: 2 T (Hq + 2 Hkv) D elements; 0.85 of copy bandwidth from T = 2048
#include "common/fp8.cuh"
#include "common/types.cuh"

#ifndef QUIRE_KV_FP8
#define QUIRE_KV_FP8 0
#endif
#if QUIRE_KV_FP8
using Kv = u8;
#else
using Kv = T;
#endif

constexpr int SIZE = Vec<T>::SIZE;
constexpr int HALF = HEAD_DIM / 2;
constexpr int LANES = HALF / SIZE;
static_assert(HEAD_DIM % (2 * SIZE) == 0 && LANES <= WARP_SIZE, "a warp holds a head in 16-byte vectors");

constexpr int power_of_two(int at_least) {
    int power = 1;
    while (power < at_least) power *= 2;
    return power;
}
constexpr int TEAM = power_of_two(LANES);

// A lane's part of a head: elements i.. and HALF + i.., in float.
struct Pair {
    float low[SIZE];
    float high[SIZE];

    __device__ __forceinline__ void load(const T* head, int i) {
        const Vec<T> a = load_vec(head + i), b = load_vec(head + HALF + i);
#pragma unroll
        for (int j = 0; j < SIZE; j++) {
            low[j] = to_float(a.at[j]);
            high[j] = to_float(b.at[j]);
        }
    }

    __device__ __forceinline__ void store(T* head, int i) const {
        Vec<T> a, b;
#pragma unroll
        for (int j = 0; j < SIZE; j++) {
            a.at[j] = from_float<T>(low[j]);
            b.at[j] = from_float<T>(high[j]);
        }
        store_vec(head + i, a);
        store_vec(head + HALF + i, b);
    }

#if QUIRE_KV_FP8
    // Rounds to T first, like a cache of that type; NaN stays NaN.
    __device__ __forceinline__ void store_fp8(u8* head, int i, float scale) const {
        struct alignas(SIZE) { u16 at[SIZE / 2]; } a, b;
        const auto scaled = [scale](float x) { return to_float(from_float<T>(x)) / scale; };
#pragma unroll
        for (int j = 0; j < SIZE; j += 2) {
            a.at[j / 2] = e4m3_pair(scaled(low[j]), scaled(low[j + 1]));
            b.at[j / 2] = e4m3_pair(scaled(high[j]), scaled(high[j + 1]));
        }
        *reinterpret_cast<decltype(a)*>(head + i) = a;
        *reinterpret_cast<decltype(b)*>(head + HALF + i) = b;
    }
#endif

    __device__ __forceinline__ void normalise(float scale, const T* weight, int i) {
        Pair by;
        by.load(weight, i);
#pragma unroll
        for (int j = 0; j < SIZE; j++) {
            low[j] *= scale * by.low[j];
            high[j] *= scale * by.high[j];
        }
    }

    // cos, sin: the position's row, from element i on.
    __device__ __forceinline__ void rotate(const float* cos, const float* sin) {
#pragma unroll
        for (int j = 0; j < SIZE; j += Vec<float>::SIZE) {
            const Vec<float> c = load_vec(cos + j), s = load_vec(sin + j);
#pragma unroll
            for (int n = 0; n < Vec<float>::SIZE; n++) {
                const float x = low[j + n], y = high[j + n];
                low[j + n] = x * c.at[n] - y * s.at[n];
                high[j + n] = y * c.at[n] + x * s.at[n];
            }
        }
    }

    __device__ __forceinline__ float square_sum() const {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < SIZE; j++) sum += low[j] * low[j] + high[j] * high[j];
        return sum;
    }
};

extern "C" __global__ void __launch_bounds__(256)
    rope_kv_write(const T* qkv, const float* cos, const float* sin, const int* positions, const i64* slots, Kv* kv,
                  const T* q_norm, const T* k_norm, T* q_out, int num_tokens, int num_heads, int num_kv_heads,
                  int num_blocks, int num_layers, int layer, int table_len, float eps,
                  const float* kv_scales) {
    start_next_kernel();
    wait_for_previous_kernel();
    const int all_heads = num_heads + 2 * num_kv_heads;
    const int task = (blockIdx.x * blockDim.x + threadIdx.x) / TEAM;
    const int lane = threadIdx.x % TEAM;
    const bool working = task < num_tokens * all_heads && lane < LANES;
    const int token = working ? task / all_heads : 0;
    const int head = working ? task % all_heads : 0;
    const bool is_query = head < num_heads;
    const bool is_value = head >= num_heads + num_kv_heads;
    const int i = lane * SIZE;

    Pair pair = {};
    if (working) pair.load(qkv + (static_cast<i64>(token) * all_heads + head) * HEAD_DIM, i);

    // All lanes of the warp take part in the shuffles.
    float square_sum = pair.square_sum();
#pragma unroll
    for (int offset = TEAM / 2; offset > 0; offset /= 2)
        square_sum += __shfl_xor_sync(FULL_WARP, square_sum, offset);
    if (!working) return;

    const int position = positions[token];
    const bool in_table = position >= 0 && position < table_len;
    if (!is_value) {
        const T* weight = is_query ? q_norm : k_norm;
        if (weight != nullptr) pair.normalise(1.0f / sqrtf(square_sum / HEAD_DIM + eps), weight, i);
        const i64 angles = static_cast<i64>(in_table ? position : 0) * HALF + i;
        if (in_table) pair.rotate(cos + angles, sin + angles);
    }
    if (is_query) {
        if (!in_table) pair = {};
        pair.store(q_out + (static_cast<i64>(token) * num_heads + head) * HEAD_DIM, i);
        return;
    }

    const i64 slot = slots[token];
    if (!in_table || slot < 0 || slot >= static_cast<i64>(num_blocks) * BLOCK_SIZE) return;
    const i64 block = slot / BLOCK_SIZE;
    const int offset = slot % BLOCK_SIZE;
    const int kv_head = (head - num_heads) % num_kv_heads;
    const i64 tile = ((block * num_layers + layer) * 2 + is_value) * num_kv_heads + kv_head;
    Kv* to = kv + (tile * BLOCK_SIZE + offset) * HEAD_DIM;
#if QUIRE_KV_FP8
    pair.store_fp8(to, i, kv_scales[(2 * layer + is_value) * num_kv_heads + kv_head]);
#else
    pair.store(to, i);
#endif
}
