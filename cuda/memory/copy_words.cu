// copy_words: copies rows, also from and to pinned host memory: copy engines would queue them behind swapped blocks.
//
//   from: num_rows * row_bytes; to: rows of to_stride 4-byte words, row i at places[i] (int32; null: i)
//   both aligned to 4 bytes; row_bytes a multiple of 4 unless num_rows is 1
//   grid (1..256), block (256)
//   reference: NumpyOps.upload_all; roofline: none, a launch and the bus latency
#include "common/types.cuh"

extern "C" __global__ void __launch_bounds__(256)
    copy_words(const int* from, int* to, const int* places, int num_rows, int row_bytes, int to_stride) {
    const int row_words = row_bytes / 4;
    const int first = blockIdx.x * blockDim.x + threadIdx.x;
    for (int i = first; i < num_rows * row_words; i += gridDim.x * blockDim.x) {
        const int row = places == nullptr ? i / row_words : __ldcv(places + i / row_words);
        to[static_cast<i64>(row) * to_stride + i % row_words] = __ldcv(from + i);
    }
    if (first < row_bytes % 4) {  // of the only row
        const int last = row_words * 4 + first;
        reinterpret_cast<char*>(to)[last] = __ldcv(reinterpret_cast<const char*>(from) + last);
    }
}
