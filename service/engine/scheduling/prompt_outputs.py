from __future__ import annotations

from collections.abc import Sequence as Seq

from service.engine.sequence import SequenceGroup
from service.engine.step import Chunk, LogprobSpan, PoolSpan


class PromptOutputs:
    """Groups awaiting prompt log-probabilities or pooling; each position is returned once."""

    def __init__(self) -> None:
        self._awaiting_logprobs: set[SequenceGroup] = set()
        self._awaiting_pooling: set[SequenceGroup] = set()

    def add_group(self, group: SequenceGroup) -> None:
        if group.wants_prompt_logprobs:
            self._awaiting_logprobs.add(group)
        if group.wants_pooling:
            self._awaiting_pooling.add(group)

    def plan(self, chunks: Seq[Chunk]) -> tuple[tuple[LogprobSpan, ...], tuple[PoolSpan, ...]]:
        scores = self._scores(chunks) if self._awaiting_logprobs else ()
        pools = self._pools(chunks) if self._awaiting_pooling else ()
        return scores, pools

    def _scores(self, chunks: Seq[Chunk]) -> tuple[LogprobSpan, ...]:
        scores = []
        for chunk in chunks:
            group = chunk.sequence.group
            if group in self._awaiting_logprobs:
                start = max(chunk.start, group.num_scored_tokens - 1, 0)
                stop = min(chunk.end, group.num_prompt_tokens - 1)
                if start < stop:
                    scores.append(LogprobSpan(chunk, start, stop))
                    group.num_scored_tokens = stop + 1
        self._awaiting_logprobs = {
            group for group in self._awaiting_logprobs if group.wants_prompt_logprobs and group.live
        }
        return tuple(scores)

    def _pools(self, chunks: Seq[Chunk]) -> tuple[PoolSpan, ...]:
        pools = []
        for chunk in chunks:
            group = chunk.sequence.group
            if group in self._awaiting_pooling:
                first = group.num_prompt_tokens - 1 if group.request.sampling.pooling == "last" else 0
                start = max(chunk.start, group.num_pooled_tokens, first)
                stop = min(chunk.end, group.num_prompt_tokens)
                if start < stop:
                    pools.append(PoolSpan(chunk, start, stop))
                    group.num_pooled_tokens = stop
        self._awaiting_pooling = {group for group in self._awaiting_pooling if group.wants_pooling and group.live}
        return tuple(pools)
