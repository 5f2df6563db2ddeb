"""Blocks saved by sharing in parallel sampling and beam search, as in the paper's figure 15.

Savings are a share of the blocks without sharing. Every branch has the trace's output length. A real model writes its
own prompts, because random ones do not show how long beams share blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from model.sampling_params import BeamSearch, SamplingParams
from service.bench.trace import TracedRequest
from service.engine.engine import Engine
from service.engine.request import EngineRequest
from service.errors import StartupError

WIDTHS = (2, 4, 6)

METHODS = ("parallel", "beam")


@dataclass(frozen=True, kw_only=True)
class SharingFigures:
    """One method at one width; means over steps."""

    method: str
    width: int
    saved: float  # share of the logical blocks
    logical_blocks: float  # in all tables, without sharing
    used_blocks: float
    running: float  # branches
    num_copies: int  # copy-on-write
    num_preemptions: int


def params_for(method: str, width: int, num_output: int, seed: int) -> SamplingParams:
    params = SamplingParams(max_tokens=num_output, ignore_eos=True, seed=seed)
    if method == "beam":
        return replace(params, beam=BeamSearch(width=width), n=width)
    return replace(params, n=width, best_of=width)


def measure_sharing(
    engine: Engine, prompts: Sequence[tuple[int, ...]], requests: Sequence[TracedRequest], method: str, width: int
) -> SharingFigures:
    """Run all requests at once. Raises StartupError if one is refused."""
    for number, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
        params = params_for(method, width, request.num_output_tokens, number)
        engine.add_request(EngineRequest(request_id=str(number), prompt=prompt, sampling=params))
    looks, num_answers = [], 0
    while engine.has_work:
        engine.step()
        num_answers += sum(len(output.choices) for output in engine.drain_request_outputs())
        stats = engine.stats()
        looks.append((stats.num_blocks_logical, stats.num_blocks_used, stats.num_sequences_running))
    if num_answers < len(requests) * width:
        raise StartupError(f"--sharing: the engine has no room for requests of {width} branches")
    logical, used, running = map(fmean, zip(*looks, strict=True))
    return SharingFigures(
        method=method,
        width=width,
        saved=1 - used / logical if logical else 0.0,
        logical_blocks=logical,
        used_blocks=used,
        running=running,
        num_copies=stats.num_block_copies,
        num_preemptions=stats.num_preemptions,
    )


def written_prompts(engine: Engine, lengths: Sequence[int], first_token: int) -> list[tuple[int, ...]]:
    """Return prompts that the engine's model generates from `first_token`."""
    prompts = [[first_token] for _ in lengths]
    for number, length in enumerate(lengths):
        if length > 1:
            params = SamplingParams(max_tokens=length - 1, min_tokens=length - 1, seed=number)
            engine.add_request(EngineRequest(request_id=str(number), prompt=(first_token,), sampling=params))
    while engine.has_work:
        engine.step()
        for output in engine.drain_request_outputs():
            for part in output.parts:
                prompts[int(output.request_id)] += part.token_ids
    return [tuple(prompt) for prompt in prompts]


def random_prompts(requests: Sequence[TracedRequest], vocab_size: int) -> list[tuple[int, ...]]:
    random = np.random.default_rng(1)
    return [tuple(random.integers(0, vocab_size, request.num_prompt_tokens).tolist()) for request in requests]
