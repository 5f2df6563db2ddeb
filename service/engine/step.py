"""What one step does, and what came of it. Deciding makes a plan; executing it decides nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from service.engine.sequence import Sequence, SequenceGroup


class Chunk(NamedTuple):
    """`length` tokens of a sequence from position `start` on, whose blocks are already in its table.

    `samplers` get a token each from the logits of the chunk's last one: nobody where the chunk does not reach the end
    of its sequence, else the sequence, and with it those that fork from it there.
    """

    sequence: Sequence
    start: int
    length: int
    samplers: tuple[Sequence, ...]

    @property
    def end(self) -> int:
        """The position behind its last token."""
        return self.start + self.length


class LogprobSpan(NamedTuple):
    """Of this chunk the logits at positions `start` to `stop` (exclusive) are wanted too: they tell how likely the
    prompt's next tokens were."""

    chunk: Chunk
    start: int
    stop: int


class PoolSpan(NamedTuple):
    """Of this chunk the hidden states at positions `start` to `stop` (exclusive) are wanted: they are a part of those
    that the vector of its prompt is made of."""

    chunk: Chunk
    start: int
    stop: int


class BlockCopy(NamedTuple):
    """Block `target` becomes what block `source` is."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Chunks of one token come first (see model.batch.Batch). The copies come before anything is written, and each
    after those named before it. Then begin, each as one transfer, `outs` (blocks of the GPU to blocks of the host) and
    `ins` (the other way); the chunks go on beside them."""

    chunks: tuple[Chunk, ...]
    copies: tuple[BlockCopy, ...] = ()
    swap_outs: tuple[BlockCopy, ...] = ()
    swap_ins: tuple[BlockCopy, ...] = ()
    logprob_spans: tuple[LogprobSpan, ...] = ()
    pool_spans: tuple[PoolSpan, ...] = ()
    changed_tables: tuple[Chunk, ...] = ()
    """Chunks of one token whose sequences' block tables may not be as they were in the plan before; one that was not in
    that plan as such a chunk need not be here."""
    samplers: list[Sequence] = field(init=False)
    """All sequences that get a token, in the order of StepResult."""

    def __post_init__(self):
        object.__setattr__(self, "samplers", [sampler for _, _, _, due in self.chunks for sampler in due])

    @property
    def num_decodes(self) -> int:
        """Chunks of one token."""
        count = len(self.chunks)
        while count and self.chunks[count - 1].length > 1:
            count -= 1
        return count

    @property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)


class FinishedTransfer(NamedTuple):
    """All `outs` or all `ins` of a plan have arrived."""

    is_out: bool
    num_blocks: int
    seconds: float  # of the device


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token and of its best alternatives, best first."""

    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class SampledToken(NamedTuple):
    """The next token of a sequence. `is_nan`: the model gave no numbers, the id means nothing."""

    token_id: int
    is_nan: bool
    logprob: TokenLogprob | None


class PromptLogprobs(NamedTuple):
    """Some tokens of a prompt in a row, and how likely they were."""

    span: LogprobSpan
    first: int  # position
    logprobs: tuple[TokenLogprob, ...]


class PooledPrompt(NamedTuple):
    """The vector of a prompt that is computed to its end."""

    group: SequenceGroup
    vector: bytes  # float32[H], of length 1


@dataclass(frozen=True, slots=True)
class StepResult:
    """One entry for each of the plan's samplers, in their order; all that the plan's scores ask for, in parts; and of
    the prompts whose last pool it was their vectors."""

    token_ids: Seq[int]
    logprobs: Seq[TokenLogprob | None] | None = None  # None: nobody wants any
    failed: frozenset[int] = frozenset()  # the samplers, by their places, for whom the model gave no numbers
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    pooled: tuple[PooledPrompt, ...] = ()

    @classmethod
    def of(cls, sampled: Iterable[SampledToken]) -> StepResult:
        """From one after the other."""
        sampled = list(sampled)
        failed = frozenset(place for place, token in enumerate(sampled) if token.is_nan)
        return cls([token.token_id for token in sampled], [token.logprob for token in sampled], failed)

    def sampled_tokens(self) -> Iterator[SampledToken]:
        """What `of` takes."""
        for place, token_id in enumerate(self.token_ids):
            logprob = None if self.logprobs is None else self.logprobs[place]
            yield SampledToken(token_id, place in self.failed, logprob)
