// copy_words: rows of bytes from one memory to another, either of which may be pinned memory of the host.
//
//   from: num_rows * row_bytes, contiguous; to: rows that begin every to_stride words of 4 bytes; the i-th goes to row
//   places[i], int32, of it, or to row i where places is null
//   grid (1..256), block (256)
//   reference: NumpyOps.upload_all
//   needs: both aligned to 4 bytes; row_bytes a multiple of 4 unless there is one row
//   why: the copy engines serve what they are asked in its order, so that the few kilobytes of a step would wait behind
//        the megabytes of blocks on their way to the host and back; a kernel goes past them
//   roofline: none; what a step uploads should cost a launch and the way over the bus
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
