// plan_drafts: counts each sequence's accepted drafts and places the next (speculative decoding).
//
//   sampled int32 [P]; token_ids, positions int32 [T]; tables int32 [S, W]
//   runs int32 [S, 4]: first row, first index in `sampled`, rows (0: padding), tokens that the blocks hold
//   last_rows, num_accepted int32 [S]; places int32 [K + 2, S]: positions from the last accepted row's on; slots int64
//   [K, S] of `places`, -1 if written already or beyond the blocks
//   grid (ceil(S / 256)), block (256)
//   reference: NumpyOps.plan_drafts; roofline: none, one launch
#include "common/types.cuh"

extern "C" __global__ void __launch_bounds__(256)
    plan_drafts(const int* sampled, const int* token_ids, const int* positions, const int4* runs, const int* tables,
                int* last_rows, int* num_accepted, int* places, i64* slots, int num_sequences, int num_drafts,
                int table_width, int block_size) {
    const int s = blockIdx.x * blockDim.x + threadIdx.x;
    if (s >= num_sequences) return;
    const int4 run = runs[s];  // row, sample, rows, tokens
    int accepted = 0;
    while (accepted + 1 < run.z && sampled[run.y + accepted] == token_ids[run.x + accepted + 1]) accepted++;
    const bool is_there = run.z > 0;
    const int last = is_there ? positions[run.x] + accepted : -1;
    last_rows[s] = is_there ? run.x + accepted : -1;
    num_accepted[s] = accepted;
    for (int step = 0; step < num_drafts + 2; step++) places[step * num_sequences + s] = last + step;
    for (int step = 0; step < num_drafts; step++) {
        const int at = last + step;
        const bool is_written = is_there && step > 0 && at < run.w && at / block_size < table_width;
        const i64 block = is_written ? tables[static_cast<i64>(s) * table_width + at / block_size] : 0;
        slots[step * num_sequences + s] = is_written ? block * block_size + at % block_size : -1;
    }
}
