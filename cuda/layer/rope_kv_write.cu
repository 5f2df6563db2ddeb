// rope_kv_write: RMSNorm of q and k per head (if weights are given), RoPE; writes k, v to the paged cache, q to q_out.
//
//   qkv [T, (Hq + 2 Hkv) * D]; cos, sin float32 [max_len, D / 2]; positions int32 [T]; slots int64 [T]
//   kv [num_blocks, L, 2, Hkv, B, D], with QUIRE_KV_FP8 e4m3 of value / kv_scales float32 [L, 2, Hkv]
//   q_norm, k_norm [D] or null; q_out [T, Hq, D]; arrays aligned to 16 bytes; T * (Hq + 2 Hkv) * TEAM below 2^31
//   grid (ceil(T * (Hq + 2 Hkv) / (256 / TEAM))), block (256): TEAM lanes per head, each 16 bytes of both halves
//   reference: NumpyOps.rope_kv_write
//   needs: positions, slots, tables and norms written before the previous kernel begins
//   A slot outside the cache or a position outside the table writes no kv; such a position gives q of zeros.
//   roofline: 2 T (Hq + 2 Hkv) D elements; 0.85 of copy bandwidth from T = 2048
#include "layer/rotate_head.cuh"

extern "C" __global__ void __launch_bounds__(256)
    rope_kv_write(const T* qkv, const float* cos, const float* sin, const int* positions, const i64* slots, Kv* kv,
                  const T* q_norm, const T* k_norm, T* q_out, int num_tokens, int num_heads, int num_kv_heads,
                  int num_blocks, int num_layers, int layer, int table_len, float eps,
                  const float* kv_scales) {
    start_next_kernel();
    const int all_heads = num_heads + 2 * num_kv_heads;
    const int task = (blockIdx.x * blockDim.x + threadIdx.x) / TEAM;
    const int lane = threadIdx.x % TEAM;
    const bool working = task < num_tokens * all_heads && lane < LANES;
    const int token = working ? task / all_heads : 0;
    const int head = working ? task % all_heads : 0;
    const bool is_query = head < num_heads;
    const bool is_value = head >= num_heads + num_kv_heads;
    const int i = lane * SIZE;

    const int position = working ? positions[token] : -1;
    const i64 slot = working && !is_query ? slots[token] : -1;
    const bool in_table = position >= 0 && position < table_len, is_turned = in_table && !is_value;
    const T* weight = is_value ? nullptr : is_query ? q_norm : k_norm;
    Angles angles;
    Pair by;
    if (is_turned) angles.load(cos + static_cast<i64>(position) * HALF, sin + static_cast<i64>(position) * HALF, i);
    if (working && weight != nullptr) by.load(weight, i);
    wait_for_previous_kernel();

    Pair pair = {};
    if (working) pair.load(qkv + (static_cast<i64>(token) * all_heads + head) * HEAD_DIM, i);
    const float square_sum = pair.square_sum();
    if (!working) return;
    if (weight != nullptr) pair.normalise(1.0f / sqrtf(square_sum / HEAD_DIM + eps), by);
    if (is_turned) pair.rotate(angles);
    if (is_query) {
        if (!in_table) pair = {};
        pair.store(q_out + (static_cast<i64>(token) * num_heads + head) * HEAD_DIM, i);
        return;
    }

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
