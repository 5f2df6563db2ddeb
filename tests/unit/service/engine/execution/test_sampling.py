from types import SimpleNamespace

import numpy as np
import pytest

from service.engine.execution.sampling import NO_DRAFT, SampleBatch, SampleCall, read_result

SAMPLER = SimpleNamespace(
    needs_previous_tokens=False, has_logit_processors=False, has_adjusted_logprobs=False, num_alternatives=1
)
LAST = NO_DRAFT
DRAFTS = [5, 6, LAST, LAST, 7, LAST]
"""Rows of three sequences: with two drafts, with none, with one."""


def result_of(tokens, *, nan_rows=(), unmasked=(), num_calls=1, indices=(0, 3, 4)):
    """Read sampled rows whose log-probability is minus their number."""
    count = len(tokens)
    batch = SampleBatch([SAMPLER] * count, [*range(count)], np.zeros(count), 0, np.array(indices))
    batch.next_drafts, batch.unmasked = lambda: np.array(DRAFTS), frozenset(unmasked)
    numbers = np.arange(count, dtype=np.float32)
    arrays = [
        np.array(tokens, np.int32), np.isin(np.arange(count), nan_rows), -numbers, np.zeros((count, 1), np.int32),
        numbers[:, None],
    ]  # fmt: skip
    if num_calls == 1:
        calls, fetched = [SampleCall(batch.sequences, None)], [arrays]
    else:
        halves = [[*range(0, count, 2)], [*range(1, count, 2)]]
        calls = [SampleCall([SAMPLER] * len(half), None, half) for half in halves]
        fetched = [[array[half] for array in arrays] for half in halves]
    return read_result(calls, batch, fetched, prompt_logprobs=(), pooled=())


@pytest.mark.parametrize("num_calls", [1, 2])
def test_a_run_ends_after_the_first_token_that_was_not_drafted(num_calls):
    result = result_of([5, 9, 1, 2, 7, 3], num_calls=num_calls)
    assert (result.token_ids, result.indptr) == ([5, 9, 2, 7, 3], [0, 2, 3, 5])
    assert [logprob.logprob for logprob in result.logprobs] == [0, -1, -3, -4, -5]
    assert not result.failed


def test_a_row_that_failed_ends_the_run_before_it():
    result = result_of([5, 6, 1, 2, 7, 3], nan_rows=(1, 3), unmasked=(5,))
    assert result.indptr == [0, 1, 2, 3]
    assert result.failed == {1}  # its first row: nothing comes before


def test_runs_are_in_the_order_of_the_plan():
    result = result_of([5, 6, 1, 2, 8, 3], indices=(4, 0, 3))
    assert (result.token_ids, result.indptr) == ([8, 5, 6, 1, 2], [0, 1, 4, 5])
