// Rows of an all-reduce, pushed by peers (PUSH) or read from them, with the same bits.
#pragma once

#include "group/signals.cuh"

#ifndef PUSH
#error "define PUSH: 0 or 1"
#endif

__device__ __forceinline__ Vec<T> sum_of(const Vec<T> (&parts)[NUM_RANKS]) {
    Vec<T> sum;
#pragma unroll
    for (int j = 0; j < Vec<T>::SIZE; j++) {
        float x = to_float(parts[0].at[j]);
#pragma unroll
        for (int r = 1; r < NUM_RANKS; r++) x += to_float(parts[r].at[j]);
        sum.at[j] = from_float<T>(x);
    }
    return sum;
}

#if PUSH

// A block pushes row blockIdx.x to every peer, each 4-byte word with the push number. Two slots suffice: a peer that
// sends a row has read the previous one. Rows have at most PUSH_ROW_BYTES, aligned to 16.
struct RankRows {
    static constexpr bool MANY_ROWS = false;
    static constexpr int WORDS = 2;  // 16-byte slot words per vector
    const Group& group;
    const PerRank<const T>& parts;
    u32 number;

    __device__ __forceinline__ RankRows(const Group& group, const PerRank<const T>& parts)
        : group(group), parts(parts), number(*group.own(PUSHES + blockIdx.x) + 1) {}

    // Element i of the row that `sender` pushes to `receiver`.
    __device__ __forceinline__ uint4* slot(int receiver, int sender, int i) const {
        const i64 row = ((number & 1) * NUM_RANKS + sender) * MAX_PUSH_ROWS + blockIdx.x;
        u8* slots = reinterpret_cast<u8*>(group.words.at[receiver] + SLOTS);
        return reinterpret_cast<uint4*>(slots + row * 2 * PUSH_ROW_BYTES + i * static_cast<int>(2 * sizeof(T)));
    }

    __device__ __forceinline__ bool begin(int width) {
        const T* row = parts.at[group.rank] + static_cast<i64>(blockIdx.x) * width;
        for (int i = threadIdx.x * Vec<T>::SIZE; i < width; i += blockDim.x * Vec<T>::SIZE) {
            const Vec<T> own = load_vec(row + i);
            const uint4 bits = *reinterpret_cast<const uint4*>(&own);
#pragma unroll
            for (int n = 1; n < NUM_RANKS; n++) {
                const int peer = (group.rank + n) % NUM_RANKS;
                uint4* to = slot(peer, group.rank, i);
                store_to_rank(to, make_uint4(bits.x, number, bits.y, number));
                store_to_rank(to + 1, make_uint4(bits.z, number, bits.w, number));
            }
        }
        return true;
    }

    __device__ __forceinline__ bool is_there(const uint4 (&words)[WORDS]) const {
        return words[0].y == number && words[0].w == number && words[1].y == number && words[1].w == number;
    }

    __device__ __forceinline__ Vec<T> sum_vec(i64 start, int i) const {
        uint4 words[NUM_RANKS][WORDS];
#pragma unroll
        for (int r = 0; r < NUM_RANKS; r++) {
            if (r == group.rank) continue;
#pragma unroll
            for (int n = 0; n < WORDS; n++) words[r][n] = load_from_rank(slot(group.rank, r, i) + n);
        }
        Vec<T> each[NUM_RANKS];
#pragma unroll
        for (int r = 0; r < NUM_RANKS; r++) {
            if (r == group.rank) {
                each[r] = load_vec(parts.at[r] + start + i);
                continue;
            }
            if (!is_there(words[r]))
                wait_for_rank(group, r, [&]() {
#pragma unroll
                    for (int n = 0; n < WORDS; n++) words[r][n] = load_from_rank(slot(group.rank, r, i) + n);
                    return is_there(words[r]);
                });
            const uint4 bits = make_uint4(words[r][0].x, words[r][0].z, words[r][1].x, words[r][1].z);
            each[r] = *reinterpret_cast<const Vec<T>*>(&bits);
        }
        return sum_of(each);
    }

    __device__ __forceinline__ T sum_one(i64 start, int i) const {
        return sum_vec(start, i / Vec<T>::SIZE * Vec<T>::SIZE).at[i % Vec<T>::SIZE];
    }

    __device__ __forceinline__ void end() {
        __syncthreads();
        if (threadIdx.x == 0) *group.own(PUSHES + blockIdx.x) = number;
    }
};

#else

struct RankRows {
    static constexpr bool MANY_ROWS = true;
    Barrier barrier;
    const PerRank<const T>& parts;

    __device__ __forceinline__ RankRows(const Group& group, const PerRank<const T>& parts)
        : barrier(group), parts(parts) {}

    __device__ __forceinline__ bool begin(int) { return barrier.meet(); }

    __device__ __forceinline__ Vec<T> sum_vec(i64 start, int i) const {
        Vec<T> each[NUM_RANKS];
#pragma unroll
        for (int r = 0; r < NUM_RANKS; r++) each[r] = load_rank_vec(parts.at[r] + start + i);
        return sum_of(each);
    }

    __device__ __forceinline__ T sum_one(i64 start, int i) const {
        float x = to_float(load_rank_element(parts.at[0] + start + i));
#pragma unroll
        for (int r = 1; r < NUM_RANKS; r++) x += to_float(load_rank_element(parts.at[r] + start + i));
        return from_float<T>(x);
    }

    __device__ __forceinline__ void end() {
        barrier.meet();
        barrier.close();
    }
};

#endif

__device__ __forceinline__ bool are_aligned(const PerRank<const T>& parts) {
    bool aligned = true;
#pragma unroll
    for (int r = 0; r < NUM_RANKS; r++) aligned = aligned && is_aligned_16(parts.at[r]);
    return aligned;
}

// residual[t] += the sum's row t, rounded to T; then norm(load_vec, load_one, row, t), for each row t of the block.
template <typename Norm>
__device__ __forceinline__ void add_rows(const Group& group, const PerRank<const T>& parts, T* residual, int num_rows,
                                         int width, bool aligned, Norm norm) {
    constexpr int SIZE = Vec<T>::SIZE;
    RankRows rows(group, parts);
    if (!rows.begin(width)) return;
    for (int t = blockIdx.x; t < num_rows; t = RankRows::MANY_ROWS ? t + gridDim.x : num_rows) {
        const i64 start = static_cast<i64>(t) * width;
        T* row = residual + start;
        if (aligned) {
#pragma unroll 1
            for (int i = threadIdx.x * SIZE; i < width; i += blockDim.x * SIZE) {
                Vec<T> sum = load_vec(row + i);  // loads while the block waits
                const Vec<T> more = rows.sum_vec(start, i);
#pragma unroll
                for (int j = 0; j < SIZE; j++) sum.at[j] = from_float<T>(to_float(sum.at[j]) + to_float(more.at[j]));
                store_vec(row + i, sum);
            }
        } else {
#pragma unroll 1
            for (int i = threadIdx.x; i < width; i += blockDim.x)
                row[i] = from_float<T>(to_float(row[i]) + to_float(rows.sum_one(start, i)));
        }
        __syncthreads();
        norm([row](int i) { return load_vec(row + i); }, [row](int i) { return row[i]; }, row, t);
    }
    rows.end();
}
