"""Two cards reach each other's memory, or are refused by name."""

import importlib
import time

import numpy as np
import pytest

from model.errors import ModelError
from tests.support.group_checks import on_ranks, total
from tests.support.kernel_checks import normal

pytestmark = pytest.mark.gpu


def test_a_group_opens_and_sums_across_its_cards(open_cards, rng):
    """`open_devices` itself sums over the links and compares."""
    start = time.perf_counter()
    ops = open_cards("bfloat16", (0, 1))
    print(f"\n2 cards opened in {time.perf_counter() - start:.1f} s: {[rank.label for rank in ops.ranks]}")
    hosts = [normal(rng, (1, 4096), "bfloat16") for _ in ops.ranks]
    with ops.scratch():
        parts = on_ranks(ops, hosts)
        assert ops.download(type(parts)(tuple(ops.sums.sum(parts.parts)))).tobytes() == total(hosts).tobytes()


def test_two_ranks_on_one_card(open_group):
    ops = open_group("float32")
    assert (ops.name, ops.num_ranks) == ("cuda", len(ops.ranks))
    assert ops.download(ops.upload(np.arange(5))).tolist() == [0, 1, 2, 3, 4]


def test_too_few_cards():
    opening = importlib.import_module("model.ops.gpu.group.open")
    with pytest.raises(ModelError, match=r"--tensor-parallel-size: 64 GPUs are needed, \d are visible"):
        opening.open_cuda_group(np.dtype(np.float32), None, 64)
