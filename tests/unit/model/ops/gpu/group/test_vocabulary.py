"""Launches that sample a part of the vocabulary."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from model.ops.gpu.group.vocabulary import sample_part
from tests.support.fake_ranks import FakeRank, launches
from tests.support.sampling_cases import random_bias, random_options


def test_a_bias_is_applied_to_the_part_of_a_rank():
    log: list[tuple[object, ...]] = []
    rank, rng = FakeRank(0, log), np.random.default_rng(0)
    options = replace(random_options(rng, 3, 16), penalties=None, bias=None)
    logits = np.zeros((3, 8), np.float32)
    candidates = sample_part(rank, logits, options, 8)
    assert candidates.token_ids.shape == candidates.score.shape == candidates.tie.shape == (3,)
    sample_part(rank, logits, replace(options, bias=random_bias(rng, 3, 16)), 8)
    assert [name for _, name, *_ in launches(log)] == ["sample_part", "apply_penalties", "sample_part"]
    plain, shaped, _ = (one for one in log if one[0] == "launch")
    assert [int(size) for size in plain[4][-2:]] == [int(size) for size in shaped[4][-2:]] == [8, 8]
    assert shaped[5]["IS_PART"] == 1
