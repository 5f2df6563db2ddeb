// best_of_ranks: each row's candidate with the highest score, then highest tie, then lowest rank (lowest ids).
//
//   token_ids int32, scores, ties float32: [NUM_RANKS] of [R] -> best int32 [R], is_nan bool [R]
//   grid (1), block (multiple of 32, at least NUM_RANKS)
//   reference: NumpyCollectives.best; roofline: three link latencies; not measured
#include "group/signals.cuh"

extern "C" __global__ void __launch_bounds__(1024)
    best_of_ranks(const __grid_constant__ Group group, const __grid_constant__ PerRank<const int> token_ids,
                  const __grid_constant__ PerRank<const float> scores,
                  const __grid_constant__ PerRank<const float> ties, int* best, bool* is_nan, int num_rows) {
    start_next_kernel();
    wait_for_previous_kernel();
    Barrier barrier(group);
    if (!barrier.meet()) return;
    for (int row = threadIdx.x; row < num_rows; row += blockDim.x) {
        int id = load_rank_element(token_ids.at[0] + row);
        float score = load_rank_element(scores.at[0] + row), tie = load_rank_element(ties.at[0] + row);
        bool any_nan = score != score;
#pragma unroll
        for (int r = 1; r < NUM_RANKS; r++) {
            const int its_id = load_rank_element(token_ids.at[r] + row);
            const float its_score = load_rank_element(scores.at[r] + row), its_tie = load_rank_element(ties.at[r] + row);
            any_nan |= its_score != its_score;
            if (its_score > score || (its_score == score && its_tie > tie)) {
                id = its_id;
                score = its_score;
                tie = its_tie;
            }
        }
        const bool has_none = any_nan || tie == -positive_infinity();
        best[row] = has_none ? 0 : id;
        is_nan[row] = has_none;
    }
    barrier.meet();
    barrier.close();
}
