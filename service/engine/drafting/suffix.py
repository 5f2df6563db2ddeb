"""Suffix decoding: draft from the tenant's recent outputs and the sequence's own tokens, as they continued before."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq

from service.engine.drafting.drafter import SUFFIX
from service.engine.drafting.ngram import TokenIndex, repeated
from service.engine.drafting.past_outputs import KEY_TOKENS, TOKEN_BYTES, PastOutputs, num_matching
from service.engine.sequence import Sequence

MAX_TOKENS = 1 << 20
"""Maximum tokens over all tenants' outputs."""


class SuffixDrafter:
    """Suffix drafter. Outputs of one tenant never draft for another: response times would reveal what others wrote."""

    source, writes_cache, token_s = SUFFIX, False, 0.0

    def __init__(self, *, max_depth: int, max_requests: int, max_spec_factor: float, min_token_prob: float):
        """Draft at most `max_spec_factor` tokens per matching token (counting at most `max_depth`), while the most
        frequent next token has `min_token_prob`."""
        self._max_depth, self._max_requests = max_depth, max_requests
        self._max_spec_factor, self._min_token_prob = max_spec_factor, min_token_prob
        self._tenants: dict[str, PastOutputs] = {}
        self._order: deque[tuple[str, int]] = deque()  # (tenant, tokens), oldest first
        self._num_tokens = 0
        self._indexes: dict[Sequence, TokenIndex] = {}

    def draft(self, sequences: Seq[Sequence], max_tokens: Seq[int]) -> list[tuple[int, ...]]:
        return [self._draft(one, count) for one, count in zip(sequences, max_tokens, strict=True)]

    def on_end(self, sequence: Sequence) -> None:
        """Add the output to its tenant's, dropping the oldest outputs beyond the limits."""
        self._indexes.pop(sequence, None)
        output = sequence.token_ids[sequence.num_prompt_tokens :]
        if len(output) <= KEY_TOKENS or self._max_requests == 0:
            return
        self._tenants.setdefault(sequence.group.tenant, PastOutputs()).add(output)
        self._order.append((sequence.group.tenant, len(output)))
        self._num_tokens += len(output)
        while len(self._order) > self._max_requests or (self._num_tokens > MAX_TOKENS and len(self._order) > 1):
            tenant, count = self._order.popleft()
            self._num_tokens -= count
            self._tenants[tenant].drop_oldest()
            if not self._tenants[tenant]:
                del self._tenants[tenant]

    def _draft(self, sequence: Sequence, count: int) -> tuple[int, ...]:
        """Return what followed the longest match; on a tie, the sequence's own."""
        tokens, index = sequence.token_ids, self._indexes.get(sequence)
        recent = tokens[-self._max_depth :].tobytes()
        if index is None:
            index = self._indexes[sequence] = TokenIndex((KEY_TOKENS,))
        start, depth = index.find(sequence), 0
        if start is not None:
            depth = num_matching(recent, tokens[max(0, start - self._max_depth) : start].tobytes())
        past = self._tenants.get(sequence.group.tenant)
        if past is not None and depth * TOKEN_BYTES < len(recent):
            longer, ends = past.longest_matches(recent, depth + 1)
            if ends:
                count = min(count, int(longer * self._max_spec_factor))
                return past.continuation(ends, count, self._min_token_prob)
        count = min(count, int(depth * self._max_spec_factor))
        return () if start is None else repeated(sequence, start, count)
