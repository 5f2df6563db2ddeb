// Work items of the MoE grouped GEMMs: out[p] = x[row of p] @ weight[expert of p].T for sorted (row, expert) pairs p.
// An item is up to CHUNK_ROWS pairs of an expert x a tile of its weight rows.
//
//   x [T, K] with rows int32 [P], or sorted [P, K] (rows null or absent); weight [E, N, K], offsets int32 [E + 1],
//   E <= 1024, out [P, N]; arrays aligned to 16 bytes
//   An expert with n rows is read ceil(n / CHUNK_ROWS) times. A row's bits depend only on K and the build.
#pragma once

#include "common/types.cuh"

struct ExpertItem {
    int index;
    int expert;
    int first_pair, num_pairs;
    int tile_row;  // N past the last item
};

// Items in order: a chunk's tiles, then the expert's next chunk. Reads `offsets`.
template <int CHUNK_ROWS, int ITEM_TILE_ROWS>
struct ExpertItems {
    const int* offsets;
    int* ends;  // shared [E]: chunks up to and including each expert
    int num_experts, n_size, num_tiles, num_items;

    // Called by the whole block.
    __device__ __forceinline__ ExpertItems(const int* offsets, int* ends, int num_experts, int n_size)
        : offsets(offsets), ends(ends), num_experts(num_experts), n_size(n_size),
          num_tiles((n_size + ITEM_TILE_ROWS - 1) / ITEM_TILE_ROWS) {
        int before = 0;
        for (int first = 0; first < num_experts; first += blockDim.x) {
            const int e = first + threadIdx.x;
            const int count = e < num_experts ? __ldcg(offsets + e + 1) - __ldcg(offsets + e) : 0;
            int total;
            const int end = before + block_scan((count + CHUNK_ROWS - 1) / CHUNK_ROWS, &total);
            if (e < num_experts) ends[e] = end;
            before += total;
        }
        __syncthreads();
        num_items = before * num_tiles;
    }

    __device__ __forceinline__ ExpertItem at(int index) const {
        ExpertItem item = {index, 0, 0, 1, n_size};
        if (index >= num_items) return item;
        const int chunk = index / num_tiles;
        int low = 0, high = num_experts - 1;  // first expert whose end is past the chunk
        while (low < high) {
            const int middle = (low + high) / 2;
            if (ends[middle] > chunk)
                high = middle;
            else
                low = middle + 1;
        }
        item.expert = low;
        item.first_pair = __ldcg(offsets + low) + (chunk - (low > 0 ? ends[low - 1] : 0)) * CHUNK_ROWS;
        item.num_pairs = min(CHUNK_ROWS, __ldcg(offsets + low + 1) - item.first_pair);
        item.tile_row = index % num_tiles * ITEM_TILE_ROWS;
        return item;
    }
};
