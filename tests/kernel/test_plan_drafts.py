import numpy as np
import pytest

from model.ops.cpu.ops import NumpyOps
from model.ops.interface import DraftPlan, DraftRuns

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("count", [1, 5, 300])
@pytest.mark.parametrize("num_drafts", [1, 4, 16])
def test_drafts_are_compared_and_the_next_ones_placed(open_ops, rng, count, num_drafts):
    """Runs of up to 17 rows, right up to anywhere; padding; blocks that end before the drafts."""
    ops, reference, block_size = open_ops("bfloat16"), NumpyOps(np.dtype(np.float32)), 16
    lengths = rng.integers(0, 18, count)
    first = np.cumsum(lengths) - lengths
    starts = rng.integers(0, 200, count)
    total = int(lengths.sum()) + 3
    token_ids = rng.integers(0, 3, total).astype(np.int32)
    positions = np.zeros(total, np.int32)
    for row, length, start in zip(first, lengths, starts, strict=True):
        positions[row : row + length] = start + np.arange(length)
    sampled = np.append(token_ids[1:], 0).astype(np.int32)
    sampled[rng.random(total) < 0.2] = 7
    held = starts + lengths + rng.integers(0, num_drafts + 1, count)
    runs = np.stack([first, first, lengths, held], axis=1).astype(np.int32)
    tables = rng.integers(0, 1000, (count, 14)).astype(np.int32)

    def empty():
        shapes = ((count,), np.int32), ((count,), np.int32), ((num_drafts + 2, count), np.int32)
        return DraftPlan(*(np.zeros(*each) for each in shapes), np.zeros((num_drafts, count), np.int64))

    wanted, filled = empty(), DraftPlan(*map(ops.upload, vars(empty()).values()))
    reference.plan_drafts(sampled, (token_ids, positions), DraftRuns(runs, tables, block_size), wanted)
    arrays = [ops.upload(one) for one in (sampled, token_ids, positions, runs, tables)]
    ops.plan_drafts(arrays[0], tuple(arrays[1:3]), DraftRuns(*arrays[3:], block_size), filled)
    assert wanted.num_accepted.max() > 0 or count == 1
    for name, array in vars(wanted).items():
        np.testing.assert_array_equal(ops.download(getattr(filled, name)), array, err_msg=name)
