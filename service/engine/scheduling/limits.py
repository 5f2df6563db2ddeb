from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

MAX_OPEN_CHUNKS = 3
PROMPTS_A_CHUNK = 64
"""Prefill chunks of a step with decodes: up to 3, or one per 64 waiting prompts."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_chunk: int  # per open prompt, with decodes
    max_model_len: int
    max_decode_rows: int | None = None  # decodes and their drafts; None: only limited by tokens
    short_rope_len: int = 0  # longest sequence that uses the short rows of RopeTables
    generates: bool = True  # False: pooling requests only
    fit_prompts: Callable[[int, int], int] | None = None  # (decodes, prompt tokens) -> efficient number

    def first_rope_row(self, num_tokens: int) -> int:
        """Return the first row of RopeTables for a sequence of at most `num_tokens`."""
        return self.max_model_len if num_tokens <= self.short_rope_len else 0

    def prompt_budget(self, num_decodes: int, num_prompts: int, lacking: Iterable[int]) -> int:
        """Return the prompt tokens of a step with decodes, which they delay: one chunk per open prompt, minus the
        decodes; more with a long queue, at the device's best rate. `lacking`: uncomputed tokens per prompt."""
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
