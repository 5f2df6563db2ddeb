"""Requests that stay within a rope's original length get the tokens of an engine that allows no more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from model.sampling_params import BeamSearch
from service.config.speculative import SpeculativeConfig, parse_speculative_config
from tests.support.goldens import Golden
from tests.support.rope_requests import LONG, ROUNDING, SHORT, answers, engine_of, requests_of

PLAIN = {"enable_prefix_caching": False, "max_num_batched_tokens": 256}
NGRAM = parse_speculative_config('{"method": "ngram", "num_speculative_tokens": 3}')


@pytest.mark.parametrize("speculative_config", [None, NGRAM], ids=["", "ngram"])
@pytest.mark.parametrize(("name", "original"), [("phi4_mini_longrope_bf16", 32), ("llama_dynamic_bf16", 64)])
def test_each_has_the_rope_of_its_longest_length(
    name: str, original: int, speculative_config: SpeculativeConfig | None
):
    golden, how = Golden.load(name), {"speculative_config": speculative_config}
    requests = requests_of(golden, original)
    together = answers(engine_of(golden, 128, **how), requests)
    short = answers(engine_of(golden, original, **how), {SHORT: requests[SHORT]})[SHORT]
    long = answers(engine_of(golden, 128, **how), {LONG: requests[LONG]})[LONG]
    assert together[SHORT].is_close_to(short)
    assert together[LONG].is_close_to(long)
    assert abs(long.logprobs[0] - short.logprobs[0]) > 10 * ROUNDING


def test_beams_have_it_too():
    golden, original = Golden.load("phi4_mini_longrope_bf16"), 32
    requests = requests_of(golden, original, n=2, beam=BeamSearch(width=3))
    together = answers(engine_of(golden, 128), requests)
    short = answers(engine_of(golden, original), {SHORT: requests[SHORT]})[SHORT]
    assert together[SHORT].is_close_to(short)
    assert not together[LONG].is_close_to(short)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preempted_requests_keep_their_rope(mode: str):
    golden, original = Golden.load("llama_dynamic_bf16"), 64
    requests = requests_of(golden, original)
    copies = {
        f"{name} {number}": replace(requests[name], request_id=f"{name} {number}")
        for name in requests
        for number in range(3)
    }
    engine = engine_of(golden, 128, num_gpu_blocks=18, swap_space=0.01, preemption_mode=mode, **PLAIN)
    together = answers(engine, copies)
    assert engine.stats().num_preemptions > 0
    expected = {name: answers(engine_of(golden, 128), {name: request})[name] for name, request in requests.items()}
    for name, answer in together.items():
        assert answer.is_close_to(expected[name.split()[0]])
