"""10,000 sums of random sizes and paths without a wait of the host, ranks delayed at random; and replayed graphs."""

import importlib

import numpy as np
import pytest

from model.ops.gpu.group.paths import SumPath, fits_push
from tests.support.group_checks import on_ranks, total
from tests.support.kernel_checks import normal

pytestmark = pytest.mark.gpu
NUM_SUMS, NUM_INPUTS, MAX_ROWS, WIDTH, EPS = 10_000, 64, 64, 1024, 1e-6
DELAY = """
extern "C" __global__ void delay(long long ns) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); while (now - start < ns);
}
"""


def delays(ops):
    """Return a function per rank that keeps its stream busy for a number of ns."""
    cupy, kernels = importlib.import_module("cupy"), []
    for rank in ops.ranks:
        rank.use()
        kernels.append(cupy.RawModule(code=DELAY).get_function("delay"))

    def delay(number: int, ns: int) -> None:
        ops.ranks[number].use()
        with ops.ranks[number].stream:
            kernels[number]((1,), (1,), (np.int64(ns),))

    return delay


def test_sums_with_ranks_delayed_at_random(open_group, rng):
    ops = open_group("bfloat16")
    hosts = [[normal(rng, (MAX_ROWS, WIDTH), "bfloat16") for _ in ops.ranks] for _ in range(NUM_INPUTS)]
    inputs, sums = [on_ranks(ops, each) for each in hosts], [total(each) for each in hosts]
    residual, expected = np.zeros((MAX_ROWS, WIDTH), ops.dtype), np.zeros((MAX_ROWS, WIDTH), ops.dtype)
    own, weight, delay = ops.upload(residual), ops.upload(residual[0]), delays(ops)
    out = ops.empty((MAX_ROWS, WIDTH), ops.dtype)
    paths = [SumPath.PUSH, SumPath.PULL, SumPath.TWO_SHOT]
    for path in paths:  # load kernels
        _sum(ops, path, inputs[0], own, weight, out, 1)
    own = ops.upload(residual)
    for _ in range(NUM_SUMS):
        index, rows, path = int(rng.integers(NUM_INPUTS)), int(rng.integers(1, MAX_ROWS + 1)), paths[rng.integers(3)]
        if path is SumPath.PUSH:
            rows = min(rows, 16)
        if rng.random() < 0.05:
            delay(int(rng.integers(ops.num_ranks)), int(rng.integers(200_000)))
        _sum(ops, path, inputs[index], own, weight, out, rows)
        expected[:rows] += sums[index][:rows]
    assert ops.download(own).tobytes() == expected.tobytes()


def _sum(ops, path, parts, own, weight, out, rows):
    parts, own, out = parts[:rows], own[:rows], out[:rows]
    assert fits_push(rows, WIDTH * 2) or path is not SumPath.PUSH
    if path is SumPath.TWO_SHOT:
        with ops.scratch():
            summed = type(parts)(tuple(ops.sums.sum_by(path, parts.parts)))
            ops.add_rms_norm(summed, own, weight, EPS, out)
        return
    ops.sums.sum_add_rms_norm(path, parts.parts, own.parts, weight.parts, EPS, out.parts)


def test_graphs_of_sums_are_replayed(open_group, rng):
    """An odd number of pushes a graph, with eager sums between the replays."""
    ops = open_group("float32")
    hosts = [normal(rng, (4, WIDTH), "float32") for _ in ops.ranks]
    parts, weight = on_ranks(ops, hosts), ops.upload(np.ones(WIDTH, np.float32))
    own, out = ops.upload(np.zeros((4, WIDTH), np.float32)), ops.empty((4, WIDTH), ops.dtype)

    def work() -> None:
        for path in (SumPath.PUSH, SumPath.PULL, SumPath.TWO_SHOT, SumPath.PUSH, SumPath.PUSH):
            _sum(ops, path, parts, own, weight, out, 4)

    replay, expected = ops.capture(work), np.zeros((4, WIDTH), np.float32)
    for _ in range(5):  # the warm-up's
        expected += total(hosts)
    for number in range(50):
        replay()
        if number % 3 == 0:
            _sum(ops, SumPath.PUSH, parts, own, weight, out, 3)
        for _ in range(5):
            expected += total(hosts)
        if number % 3 == 0:
            expected[:3] += total(hosts)[:3]
    assert ops.download(own).tobytes() == expected.tobytes()
