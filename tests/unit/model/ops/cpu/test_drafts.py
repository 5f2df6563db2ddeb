import numpy as np

from model.ops.cpu.ops import NumpyOps
from model.ops.interface import DraftPlan, DraftRuns

OPS = NumpyOps(np.dtype(np.float32))


def test_the_next_drafts_follow_the_last_right_one():
    """Three runs: one of two drafts is right; no drafts and full blocks; padding."""
    token_ids, positions = np.array([5, 6, 7, 9], np.int32), np.array([10, 11, 12, 3], np.int32)
    sampled = np.array([0, 6, 8, 1, 4], np.int32)
    runs = np.array([(0, 1, 3, 16), (3, 4, 1, 5), (0, 0, 0, 0)], np.int32)
    tables = np.array([(2, 3, 7, 4), (6, 0, 0, 0), (0, 0, 0, 0)], np.int32)
    last_rows, num_accepted = np.zeros((2, 3), np.int32)
    plan = DraftPlan(last_rows, num_accepted, np.zeros((5, 3), np.int32), np.zeros((3, 3), np.int64))
    OPS.plan_drafts(sampled, (token_ids, positions), DraftRuns(runs, tables, 4), plan)
    assert last_rows.tolist() == [1, 3, -1]
    assert num_accepted.tolist() == [1, 0, 0]
    assert plan.places.T.tolist() == [[11, 12, 13, 14, 15], [3, 4, 5, 6, 7], [-1, 0, 1, 2, 3]]
    assert plan.slots.T.tolist() == [[-1, 16, 17], [-1, 0, -1], [-1, -1, -1]]


def test_tokens_without_a_column_cannot_be_drawn():
    logits = np.array([[1, 2, 3]], np.float32)
    spread = OPS.spread_logits(logits, np.array([2, -1, 0, 3], np.int32))
    assert spread.tolist() == [[3, -np.inf, 1, -np.inf]]
