"""Workloads in vLLM's words: lengths, arrivals, and the conversations of a ShareGPT file."""

from __future__ import annotations

import argparse
import json

import numpy as np
import pytest

from service.bench.datasets import add_dataset_flags, arrivals, make_dataset, read_rate, read_sharegpt
from service.errors import StartupError


def flags_of(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_dataset_flags(parser)
    return parser.parse_args(words)


async def random_lengths(*words: str) -> list[tuple[int, int]]:
    dataset = await make_dataset(flags_of("--dataset-name", "random", "--num-prompts", "400", *words), None, "", "m")
    return [(request.num_prompt_tokens, request.num_output_tokens) for request in dataset.requests]


async def test_random_lengths_are_fixed_or_vary_by_the_ratio():
    lens = ("--random-input-len", "100", "--random-output-len", "20")
    assert await random_lengths(*lens) == [(100, 20)] * 400
    varied = await random_lengths(*lens, "--random-range-ratio", "0.5")
    for column, low, high in ((0, 50, 150), (1, 10, 30)):
        lengths = [pair[column] for pair in varied]
        assert low <= min(lengths) < low + 6
        assert high - 6 < max(lengths) <= high
    assert varied == await random_lengths(*lens, "--random-range-ratio", "0.5", "--seed", "0")
    assert varied != await random_lengths(*lens, "--random-range-ratio", "0.5", "--seed", "1")


@pytest.mark.parametrize("burstiness", [0.2, 1.0, 50.0])
def test_arrivals_have_the_rate_and_the_burstiness(burstiness):
    times = arrivals(20_000, burstiness, np.random.default_rng(0))
    gaps = np.diff(times, prepend=0)
    assert times[-1] == pytest.approx(20_000)
    assert gaps.min() >= 0
    assert gaps.std() == pytest.approx(1 / burstiness**0.5, rel=0.1)  # of a gamma distribution of mean 1


def test_rates():
    assert read_rate(flags_of()) == read_rate(flags_of("--request-rate", "INF")) == float("inf")
    assert read_rate(flags_of("--request-rate", "2.5")) == 2.5
    with pytest.raises(StartupError, match=r"^--request-rate: 0 is not above 0"):
        read_rate(flags_of("--request-rate", "0"))


def test_sharegpt_gives_the_first_two_turns(tmp_path):
    path = tmp_path / "s.json"
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}, {"from": "human", "value": "x"}]
    broken = [None, 3, {}, {"conversations": {}}, {"conversations": [{}, {}]}, {"conversations": [None, turns[0]]}]
    whole = [{"conversations": turns}, {"conversations": turns[:1]}, {"conversation": turns[1:]}]
    path.write_text(json.dumps([*broken, *whole]))
    assert read_sharegpt(path) == [("hi", "hello"), ("hello", "x")]
    with pytest.raises(StartupError, match="nowhere: No such file or directory"):
        read_sharegpt(tmp_path / "nowhere")
    for wrong in ("{", "{}", "[1]", '[{"conversations": [{}, {}]}]'):
        path.write_text(wrong)
        with pytest.raises(StartupError, match="not ShareGPT's JSON"):
            read_sharegpt(path)
