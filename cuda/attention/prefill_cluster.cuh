// Split-KV prefill in a cluster: the CTAs that share the keys of one piece of work send each other what they have of
// its rows, and each puts its share of them together. Nothing goes through global memory, and a cluster's CTAs run at
// once by what a cluster is.
//
// What a warp holds is cut into units of 16 columns of its 16 rows, 16 bytes a lane, in the fragments of wgmma.cuh. Unit
// i * num_warps + w is column chunk i of warp w; part u % count puts unit u together. A part is what its keys alone
// would give, in 16 bits, for the way between SMs is narrow; adding parts means weighing each by its total times 2^(its
// maximum - the largest).
//
// A build has CONSUMER_WARPS, 16 rows of the piece each.
#pragma once

#include "attention/attention.cuh"
#include "attention/prefill_rows.cuh"
#include "attention/prefill_work.cuh"
#include "common/types.cuh"
#include "common/wgmma.cuh"

constexpr int MOST_PARTS = 8;  // CTAs that any device has room for in a cluster
constexpr int CHUNKS = HEAD_DIM / 16;
constexpr int UNIT_BYTES = WARP_SIZE * 16;
constexpr int STAT_BYTES = 8 * 16;  // of a warp of a part: maximum and total of rows r and r + 8, by r
constexpr int MAX_UNITS = CONSUMER_WARPS * CHUNKS + MOST_PARTS;
constexpr int MEETING_BYTES = MAX_UNITS * UNIT_BYTES + MOST_PARTS * CONSUMER_WARPS * STAT_BYTES;

// Where a CTA receives: the units that are its to put together, part by part, then what all parts say of all rows.
struct Meeting {
    u32 base, barrier;
    int first_rank;  // of the piece's parts, in the cluster
    int index, count, num_warps;
    int inverse;  // 4096 / count + 1

    __device__ __forceinline__ u32 unit(int slot, int part) const { return base + (slot * count + part) * UNIT_BYTES; }
    __device__ __forceinline__ u32 stats(int part, int warp) const {
        return base + MAX_UNITS * UNIT_BYTES + (part * CONSUMER_WARPS + warp) * STAT_BYTES;
    }
    __device__ __forceinline__ int slot(int unit) const { return unit * inverse >> 12; }  // unit / count
    __device__ __forceinline__ int owner(int unit) const { return unit - slot(unit) * count; }
    __device__ __forceinline__ int num_slots() const { return slot(num_warps * CHUNKS + count - 1 - index); }

    // By one thread, before anything can be complete.
    __device__ __forceinline__ void expect() const {
        arrive_expecting(barrier, count * (num_slots() * UNIT_BYTES + num_warps * STAT_BYTES));
    }

    // This warp's rows go to where they are put together.
    __device__ __forceinline__ void leave(const Rows& rows, int warp, float scale_log2) const {
        const int lane = threadIdx.x % WARP_SIZE;
        const float total[2] = {sum_of_four(rows.total[0]), sum_of_four(rows.total[1])};
        const float stat[4] = {rows.maximum[0] * scale_log2, total[0], rows.maximum[1] * scale_log2, total[1]};
        if (warp >= num_warps) return;
        for (int to = lane % 4; to < count; to += 4)
            send(address_in(first_rank + to, stats(index, warp) + lane / 4 * 16), stat,
                 address_in(first_rank + to, barrier));
        const float by[2] = {reciprocal_or_zero(total[0]), reciprocal_or_zero(total[1])};
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) {
            float four[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int at = 8 * i + 2 * j;
                four[j] = __uint_as_float(pack_pair(rows.sum[at] * by[j % 2], rows.sum[at + 1] * by[j % 2]));
            }
            const int u = i * num_warps + warp, to = first_rank + owner(u);
            send(address_in(to, unit(slot(u), index) + lane * 16), four, address_in(to, barrier));
        }
    }

    // This part's units, a unit a warp at a time, once all have come.
    __device__ __forceinline__ void combine(T* out, const Work& work, int warp, int num_kv_heads) const {
        const int lane = threadIdx.x % WARP_SIZE, slots = num_slots();
        for (int s = warp; s < slots; s += CONSUMER_WARPS) {
            const int u = s * count + index, chunk = u / num_warps, of = u - chunk * num_warps;
            float weight[MOST_PARTS][4], top[2] = {minus_infinity(), minus_infinity()};
#pragma unroll
            for (int part = 0; part < MOST_PARTS; ++part) {
                if (part >= count) break;
                receive(weight[part], stats(part, of) + lane / 4 * 16);
                top[0] = fmaxf(top[0], weight[part][0]);
                top[1] = fmaxf(top[1], weight[part][2]);
            }
            const float base[2] = {finite_base(top[0]), finite_base(top[1])};
            float total[2] = {}, sum[2][4] = {};
#pragma unroll
            for (int part = 0; part < MOST_PARTS; ++part) {
                if (part >= count) break;
                float four[4];
                receive(four, unit(s, part) + lane * 16);
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float by = weight[part][2 * h + 1] * exp2_approx(weight[part][2 * h] - base[h]);
                    total[h] += by;
#pragma unroll
                    for (int n = 0; n < 2; ++n) {
                        const float2 pair = unpack_pair(__float_as_uint(four[2 * n + h]));
                        sum[n][2 * h] = fmaf(by, pair.x, sum[n][2 * h]);
                        sum[n][2 * h + 1] = fmaf(by, pair.y, sum[n][2 * h + 1]);
                    }
                }
            }
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int row = of * 16 + lane / 4 + 8 * h;
                if (!work.holds(row)) continue;
                const float scale = reciprocal_or_zero(total[h]);
                T* to = out + work.head(row, num_kv_heads) * HEAD_DIM + chunk * 16 + lane % 4 * 2;
#pragma unroll
                for (int n = 0; n < 2; ++n)
                    *reinterpret_cast<u32*>(to + 8 * n) = pack_pair(sum[n][2 * h] * scale, sum[n][2 * h + 1] * scale);
            }
        }
    }
};
