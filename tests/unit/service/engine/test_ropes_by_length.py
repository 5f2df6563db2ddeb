"""Requests that stay within a rope's original length get the tokens of an engine that allows no more."""

from __future__ import annotations

import pytest

from model.sampling_params import BeamSearch, SamplingParams
from service.config.settings import Settings
from service.config.speculative import SpeculativeConfig, parse_speculative_config
from service.engine.build import build_engine
from service.engine.request import EngineRequest
from tests.support.goldens import Golden

NGRAM = parse_speculative_config('{"method": "ngram", "num_speculative_tokens": 3}')
SHORT, LONG = "short", "long"


def engine_of(golden: Golden, max_model_len: int, **settings):
    how = {"device": "cpu", "num_gpu_blocks": 40, "block_size": 8, "swap_space": 0, **settings}
    return build_engine(Settings(model=str(golden.folder), max_model_len=max_model_len, **how), progress=False).engine


def answers(engine, requests: dict[str, EngineRequest]) -> dict[str, list[tuple[int, float]]]:
    """Return each request's tokens with their log-probabilities, all running together."""
    for request in requests.values():
        engine.add_request(request)
        engine.step()
    while engine.has_work:
        engine.step()
    found: dict[str, list[tuple[int, float]]] = {}
    for output in engine.drain_request_outputs():
        for part in output.parts:
            logprobs = [round(one.logprob, 4) for one in part.logprobs]
            found.setdefault(output.request_id, []).extend(zip(part.token_ids, logprobs, strict=True))
    return found


def requests_of(golden: Golden, original: int, **sampling) -> dict[str, EngineRequest]:
    """Return two requests with one prompt, which end at the original length and after it."""
    prompt = tuple(golden.token_ids[: original // 2].tolist())
    return {
        name: EngineRequest(
            request_id=name,
            prompt=prompt,
            sampling=SamplingParams(
                max_tokens=length - len(prompt), temperature=0.0, ignore_eos=True, logprobs=1, **sampling
            ),
        )
        for name, length in ((SHORT, original), (LONG, original + 1))
    }


@pytest.mark.parametrize("speculative_config", [None, NGRAM], ids=["", "ngram"])
@pytest.mark.parametrize(("name", "original"), [("phi4_mini_longrope_bf16", 32), ("llama_dynamic_bf16", 64)])
def test_each_has_the_rope_of_its_longest_length(
    name: str, original: int, speculative_config: SpeculativeConfig | None
):
    golden, how = Golden.load(name), {"speculative_config": speculative_config}
    requests = requests_of(golden, original)
    together = answers(engine_of(golden, 128, **how), requests)
    assert together[SHORT] == answers(engine_of(golden, original, **how), {SHORT: requests[SHORT]})[SHORT]
    assert together[LONG] == answers(engine_of(golden, 128, **how), {LONG: requests[LONG]})[LONG]
    assert together[LONG][0] != together[SHORT][0]


def test_beams_have_it_too():
    golden, original = Golden.load("phi4_mini_longrope_bf16"), 32
    requests = requests_of(golden, original, n=2, beam=BeamSearch(width=3))
    together = answers(engine_of(golden, 128), requests)
    assert together[SHORT] == answers(engine_of(golden, original), {SHORT: requests[SHORT]})[SHORT]
    assert together[LONG] != together[SHORT]
