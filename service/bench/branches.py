"""Measurements of `quire bench engine --prompts`: requests with several branches, sampled or beams."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from model.sampling_params import BeamSearch, SamplingParams
from service.engine.build import BuiltEngine
from service.engine.request import EngineRequest
from service.errors import StartupError

ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class BranchWork:
    """Simultaneous requests with `num_prompt` prompt tokens and `num_output` output tokens."""

    method: str  # "sampled" | "beams"
    num_branches: int
    num_prompts: int
    num_prompt: int
    num_output: int

    @property
    def params(self) -> SamplingParams:
        """Sampling parameters; a single branch is greedy."""
        count, length = self.num_branches, self.num_output
        if self.method == "beams":
            return SamplingParams(max_tokens=length, ignore_eos=True, beam=BeamSearch(width=count), n=count)
        temperature = 0.0 if count == 1 else 1.0
        return SamplingParams(max_tokens=length, ignore_eos=True, temperature=temperature, n=count, best_of=count)


@dataclass(frozen=True, kw_only=True)
class BranchFigures:
    """Median of ROUNDS rounds, by wall-clock time of whole steps."""

    method: str
    num_branches: int
    num_prompts: int
    prompt_tokens: int  # per request
    output_tokens: int  # per branch
    total_s: float
    output_tokens_per_s: float  # over all branches
    ttft_ms: float | None  # mean over requests; None for beams
    step_mean_ms: float  # from first to last step
    most_blocks: int  # in use at once
    most_blocks_logical: int  # in use at once if nothing were shared
    num_copies: int  # copy-on-write


def measure_branches(built: BuiltEngine, work: BranchWork) -> BranchFigures:
    """Measure one workload. Raises StartupError if the engine refuses it."""
    rounds = [_round(built, work, seed) for seed in range(1 + ROUNDS)][1:]  # the first round warms up
    return sorted(rounds, key=lambda figures: figures.total_s)[ROUNDS // 2]


def _round(built: BuiltEngine, work: BranchWork, seed: int) -> BranchFigures:
    engine, before = built.engine, built.engine.stats()
    for request in _requests(built, work, seed):
        engine.add_request(request)
    refused = engine.drain_request_outputs()
    if refused:
        raise StartupError(f"--prompts: the engine refuses requests of {work.num_branches}: {refused[0].end}")
    start_s = time.perf_counter()
    firsts_s: dict[str, float] = {}
    num_tokens, blocks = 0, [(0, 0)]
    while engine.has_work:
        engine.step()
        now_s = time.perf_counter()
        for output in engine.drain_request_outputs():
            num_tokens += sum(len(part.token_ids) for part in output.parts)
            firsts_s.setdefault(output.request_id, now_s - start_s)
        after = engine.stats()
        blocks.append((after.num_blocks_used, after.num_blocks_logical))
    total_s = time.perf_counter() - start_s
    return BranchFigures(
        method=work.method,
        num_branches=work.num_branches,
        num_prompts=work.num_prompts,
        prompt_tokens=work.num_prompt,
        output_tokens=work.num_output,
        total_s=total_s,
        output_tokens_per_s=num_tokens / total_s,
        ttft_ms=None if work.method == "beams" else 1e3 * statistics.fmean(firsts_s.values()),
        step_mean_ms=1e3 * total_s / (after.num_steps - before.num_steps),
        most_blocks=max(used for used, _ in blocks),
        most_blocks_logical=max(logical for _, logical in blocks),
        num_copies=after.num_block_copies - before.num_block_copies,
    )


def _requests(built: BuiltEngine, work: BranchWork, seed: int) -> Iterator[EngineRequest]:
    random = np.random.default_rng((seed, work.num_branches))
    for number in range(work.num_prompts):
        prompt = tuple(random.integers(0, built.config.vocab_size, work.num_prompt).tolist())
        yield EngineRequest(request_id=str(number), prompt=prompt, sampling=work.params)
