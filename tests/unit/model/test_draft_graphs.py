import math

import numpy as np

from model.draft_graphs import DraftGraphs
from model.families.eagle3_device import sampling_columns
from model.ops.cpu.ops import NumpyOps
from tests.support.draft_heads import NUM_DRAFTS, RECORDS, RUNS, draft_alone, prepared_step, random_head


def test_captured_drafts_are_the_same_with_padding():
    """Five sequences in the buffers of eight; then more sequences than are captured."""
    ops, stored = NumpyOps(np.dtype(np.float32)), random_head(7)
    wanted, step = draft_alone(ops, stored), prepared_step(ops, stored)
    graphs = DraftGraphs(step.head, step.kv, np.zeros(50, np.int32), [1, 8], NUM_DRAFTS + 2, 40)
    size = graphs.size_of(len(RUNS))
    padding = size - len(RUNS)
    rows, sampled = step.rows, ops.upload(step.next_ids)
    step.head.read(rows, sampled, step.kv, graphs.rows(len(sampled)))
    hosts = [np.pad(step.runs, ((0, padding), (0, 0))), *sampling_columns(RECORDS, size)]
    graphs.send(hosts, np.pad(step.tables, ((0, padding), (0, 0))))
    drafts = graphs.draft(sampled, (rows.token_ids, rows.positions), size, NUM_DRAFTS)
    np.testing.assert_array_equal(drafts[:, : len(RUNS)], wanted.drafts)
    assert graphs.size_of(9) is None
    assert 0 < graphs.token_s(5) < graphs.token_s(9) == math.inf
