"""What one step does, and what came of it. Deciding makes a plan; executing it decides nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from service.engine.sequence import Sequence


class Chunk(NamedTuple):
    """`length` tokens of a sequence from position `start` on, whose blocks are already in its table.

    `samples`: the chunk reaches the sequence's last token, so that the step gives it a new one.
    """

    sequence: Sequence
    start: int
    length: int
    samples: bool

    @property
    def end(self) -> int:
        return self.start + self.length


class BlockCopy(NamedTuple):
    """Block `target` becomes what block `source` is."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Chunks of one token come first (see model.batch.Batch). The copies come before anything is written, and each
    after those named before it."""

    chunks: tuple[Chunk, ...]
    copies: tuple[BlockCopy, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token and of its best alternatives, best first."""

    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class SampledToken(NamedTuple):
    """The next token of a chunk's sequence. `is_nan`: the model gave no numbers, the id means nothing."""

    token_id: int
    is_nan: bool
    logprob: TokenLogprob | None


@dataclass(frozen=True, slots=True)
class StepResult:
    """One entry for each chunk of the plan that samples, in the plan's order."""

    sampled: tuple[SampledToken, ...]
