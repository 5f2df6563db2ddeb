"""Requests on either side of a rope's original length, and small engines that answer them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from model.sampling_params import SamplingParams
from service.config.settings import Settings
from service.engine.build import build_engine
from service.engine.engine import Engine
from service.engine.request import EngineRequest
from tests.support.goldens import Golden

SHORT, LONG = "short", "long"
ROUNDING = 1e-3


def engine_of(golden: Golden, max_model_len: int, device: str = "cpu", **settings) -> Engine:
    how = {"device": device, "num_gpu_blocks": 40, "block_size": 8, "swap_space": 0, **settings}
    return build_engine(Settings(model=str(golden.folder), max_model_len=max_model_len, **how), progress=False).engine


@dataclass(frozen=True)
class Answer:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def is_close_to(self, other: Answer) -> bool:
        """Return whether tokens are equal and log-probabilities are, but for the rounding of another batch."""
        return self.token_ids == other.token_ids and np.allclose(self.logprobs, other.logprobs, atol=ROUNDING)


def answers(engine: Engine, requests: dict[str, EngineRequest]) -> dict[str, Answer]:
    """Return each request's answer, all running together."""
    for request in requests.values():
        engine.add_request(request)
        engine.step()
    while engine.has_work:
        engine.step()
    found: dict[str, Answer] = {}
    for output in engine.drain_request_outputs():
        for part in output.parts:
            answer = found.setdefault(output.request_id, Answer())
            answer.token_ids.extend(part.token_ids)
            answer.logprobs.extend(one.logprob for one in part.logprobs)
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
