"""What is wanted of prompts besides their last logits: how likely their tokens are, and their vectors."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from service.engine.sequence import SequenceGroup
from service.engine.step import Chunk, Pool, Score


class PromptWishes:
    """Of the requests that have come. What steps compute of a prompt is told, or pooled, once."""

    def __init__(self):
        self._to_score: set[SequenceGroup] = set()
        self._to_pool: set[SequenceGroup] = set()

    def add(self, group: SequenceGroup) -> None:
        """A request has come; one that wants nothing of its prompt is not kept."""
        if group.is_to_score:
            self._to_score.add(group)
        if group.is_to_pool:
            self._to_pool.add(group)

    def of(self, chunks: Seq[Chunk]) -> tuple[tuple[Score, ...], tuple[Pool, ...]]:
        """What a step of these chunks can give."""
        scores = self._scores(chunks) if self._to_score else ()
        pools = self._pools(chunks) if self._to_pool else ()
        return scores, pools

    def _scores(self, chunks: Seq[Chunk]) -> tuple[Score, ...]:
        scores = []
        for chunk in chunks:
            group = chunk.sequence.group
            if group in self._to_score:
                start = max(chunk.start, group.num_scored_tokens - 1, 0)
                stop = min(chunk.end, group.num_prompt_tokens - 1)
                if start < stop:
                    scores.append(Score(chunk, start, stop))
                    group.num_scored_tokens = stop + 1
        self._to_score = {group for group in self._to_score if group.is_to_score and group.live}
        return tuple(scores)

    def _pools(self, chunks: Seq[Chunk]) -> tuple[Pool, ...]:
        pools = []
        for chunk in chunks:
            group = chunk.sequence.group
            if group in self._to_pool:
                first = group.num_prompt_tokens - 1 if group.request.sampling.pooling == "last" else 0
                start = max(chunk.start, group.num_pooled_tokens, first)
                stop = min(chunk.end, group.num_prompt_tokens)
                if start < stop:
                    pools.append(Pool(chunk, start, stop))
                    group.num_pooled_tokens = stop
        self._to_pool = {group for group in self._to_pool if group.is_to_pool and group.live}
        return tuple(pools)
