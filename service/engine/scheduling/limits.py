"""Limits of a step and of a sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

MAX_OPEN_CHUNKS = 3
"""Prefill chunks of a step with decodes, for any number of open prompts ..."""

PROMPTS_A_CHUNK = 64
"""... until this many prompts wait for each chunk."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a step and of a sequence, in tokens and sequences."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_chunk: int  # prompt tokens of a step with decodes, for each of the first open prompts
    max_model_len: int
    fit_prompts: Callable[[int, int], int] | None = None  # (decodes, prompt tokens) -> efficient number

    def prompt_budget(self, num_decodes: int, num_prompts: int, lacking: Iterable[int]) -> int:
        """Return the prompt tokens of a step with decodes; `num_prompts` are open or waiting, and `lacking` yields the
        tokens that each computable one lacks.

        One open prompt gets one chunk. Several get as many whole chunks, minus the decodes, but few: every decode waits
        for them. Only a long queue values throughput more than short steps: its budget grows with its length, up to
        what the device computes at its best rate.
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
