// pack_int4: packs 4-bit weights into the tiles of int4.cuh, once at load.
//
//   data u8 [N, K / 2] (even k: low half), scale 16-bit [N, K / G], zero u8 [N, K / G] or null -> tiles, packed_scale,
//   packed_zero; N a multiple of 16, K of 128
//   grid over words of tiles, then scales; any block
//   reference: pack_int4 of model/ops/int4.py; roofline: none
#include "common/types.cuh"

using u8 = unsigned char;
using u16 = unsigned short;

constexpr int WORDS = 256;  // per 16 rows and span of 128 columns

__device__ __forceinline__ u32 word_of(const u8* data, int block, int span, int word, int k_size) {
    const int half = word / 128, lane = word % 128 / 4, step = word % 4, g = lane / 4, t = lane % 4;
    const i64 byte = span * 64 + half * 32 + step * 8 + t;
    const u8* near = data + static_cast<i64>(block * 16 + g) * (k_size / 2) + byte;
    const u8* far = near + static_cast<i64>(8) * (k_size / 2);
    const u32 pairs[4] = {near[0], far[0], near[4], far[4]};
    u32 packed = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) packed |= (pairs[i] & 15u) << (4 * i) | pairs[i] >> 4 << (16 + 4 * i);
    return packed;
}

extern "C" __global__ void pack_int4(const u8* data, const u16* scale, const u8* zero, u32* tiles, u16* packed_scale,
                                     u8* packed_zero, int n_size, int k_size, int num_groups) {
    const i64 task = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    const int num_blocks = n_size / 16;
    const i64 num_words = static_cast<i64>(num_blocks) * (k_size / 128) * WORDS;
    if (task < num_words) {
        const int piece = task / WORDS;
        tiles[task] = word_of(data, piece % num_blocks, piece / num_blocks, task % WORDS, k_size);
        return;
    }
    const i64 element = task - num_words;
    if (element >= static_cast<i64>(n_size) * num_groups) return;
    const int place = element % 16, block = element / 16 % num_blocks, group = element / 16 / num_blocks;
    const i64 from = static_cast<i64>(block * 16 + place / 2 + place % 2 * 8) * num_groups + group;
    packed_scale[element] = scale[from];
    if (zero != nullptr) packed_zero[element] = zero[from];
}
