from dataclasses import dataclass

import numpy as np

from model.ops.cpu.ops import NumpyOps
from model.ops.cpu.sampling import sample
from model.sampler import SampledRows, sampling_arrays, sampling_record
from model.sampling_params import SamplingParams
from service.engine.drafting.draws import drawn, drawn_on

PARAMS = (
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 3},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 1e-30},
)


@dataclass
class Record:
    """The field of a sequence that draws read."""

    sampling_record: bytes


def record(branch=0, **params):
    return sampling_record(SamplingParams(max_tokens=9, seed=5, **params), branch, None)


def test_drafts_are_what_the_sampler_draws_from_the_same_logits():
    rng, records = np.random.default_rng(0), [record(branch, **PARAMS[branch % len(PARAMS)]) for branch in range(60)]
    logits = rng.normal(0, 4, (len(records), 50)).astype(np.float32)
    positions = rng.integers(0, 999, len(records)).astype(np.uint32)
    rows = SampledRows(records=records, positions=positions, sampling=[], seen=[], num_prompt_tokens=[])
    how = sampling_arrays(rows, 50, frozenset(), list)
    wanted = sample(logits, how, None).token_ids
    got = drawn(logits, [Record(one) for one in records], positions)
    assert np.count_nonzero(got != wanted) <= 1  # of a token beyond SPAN
    assert np.count_nonzero(got != logits.argmax(axis=1)) > 10

    class Gpu(NumpyOps):
        name = "cuda"

    assert drawn_on(Gpu(), logits, [Record(one) for one in records], positions) == wanted.tolist()
    assert drawn_on(NumpyOps(), logits, [Record(one) for one in records], positions) == got.tolist()


def test_a_draft_vocabularys_tokens_have_the_noise_of_their_ids():
    vocabulary = np.array([3, 40, 41, 90])
    own = np.random.default_rng(1).normal(0, 1, (30, 4)).astype(np.float32)
    logits = np.full((30, 100), -50, np.float32)
    logits[:, vocabulary] = own
    sequences = [Record(record(branch, temperature=1.0)) for branch in range(30)]
    got = drawn(own, sequences, range(30), vocabulary)
    assert got.tolist() == drawn(logits, sequences, range(30)).tolist()
    assert len(set(got.tolist())) == 4


def test_a_greedy_draft_is_the_likeliest():
    logits = np.array([[1, 5, 2], [0, 0, 1]], np.float32)
    sequences = [Record(record(temperature=0.0))] * 2
    assert drawn(logits, sequences, [4, 9], np.array([7, 8, 9])).tolist() == [8, 9]
