"""How much a step does at most, and a sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

MAX_OPEN_CHUNKS = 3
"""Prefill chunks of a step that also decodes, however many prompts are open ..."""

PROMPTS_A_CHUNK = 64
"""... until so many wait for each."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of a step and of a sequence, in tokens and sequences."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_chunk: int  # prompt tokens of a step that also decodes, for each of the first open prompts
    max_model_len: int
    fit_prompts: Callable[[int, int], int] | None = None  # (decodes, prompt tokens): how many of these a step does best

    def prompt_budget(self, num_decodes: int, num_prompts: int, lacking: Iterable[int]) -> int:
        """Prompt tokens of a step that also decodes, with so many prompts open or waiting; `lacking`: the tokens that
        each of those lacks which could be computed now.

        A chunk where one prompt is open. Where more are, as many whole chunks as that, decodes and all, but few: every
        decode waits for them. Only a queue wants throughput more than a short step: the longer it is, the more it gets,
        and no more than the device does at its best rate.
        """
        num_chunks = max(min(num_prompts, MAX_OPEN_CHUNKS), num_prompts // PROMPTS_A_CHUNK)
        budget = max(self.max_prefill_chunk, num_chunks * self.max_prefill_chunk - num_decodes)
        if self.fit_prompts is None or num_prompts <= MAX_OPEN_CHUNKS:
            return budget
        wanted = 0
        for num_tokens in lacking:
            wanted += num_tokens
            if wanted >= budget:
                return self.fit_prompts(num_decodes, budget)
        return self.fit_prompts(num_decodes, wanted)
