from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from service.engine.sequence import Sequence, SequenceGroup


class Chunk(NamedTuple):
    """`length` tokens of a sequence from `start`; their blocks are in its table.

    Each of `sampled_sequences` gets a token from the last logits: the sequence and branches that fork there; none
    before its end. With `drafts` at the end, the only one gets a token per accepted draft, plus one.
    """

    sequence: Sequence
    start: int
    length: int
    sampled_sequences: tuple[Sequence, ...]
    drafts: Seq[int] = ()

    @property
    def end(self) -> int:
        return self.start + self.length


class LogprobSpan(NamedTuple):
    """Prompt positions [start, stop) whose logits score the next tokens."""

    chunk: Chunk
    start: int
    stop: int


class PoolSpan(NamedTuple):
    """Prompt positions [start, stop) to pool."""

    chunk: Chunk
    start: int
    stop: int


class BlockCopy(NamedTuple):
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Work of one step, one-token chunks first. `copies` precede all writes; then `swap_outs` (to the host) and
    `swap_ins` run while chunks are computed."""

    chunks: tuple[Chunk, ...]
    copies: tuple[BlockCopy, ...] = ()
    swap_outs: tuple[BlockCopy, ...] = ()
    swap_ins: tuple[BlockCopy, ...] = ()
    logprob_spans: tuple[LogprobSpan, ...] = ()
    pool_spans: tuple[PoolSpan, ...] = ()
    changed_tables: tuple[Chunk, ...] = ()
    """One-token chunks, also of the previous plan, whose table changed since."""
    sampled_sequences: list[Sequence] = field(init=False)
    """Sequences of all chunks, in the order of StepResult."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sampled_sequences", [sequence for chunk in self.chunks for sequence in chunk[3]])

    @property
    def num_decodes(self) -> int:
        count = len(self.chunks)
        while count and self.chunks[count - 1].length > 1:
            count -= 1
        return count

    @property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)


class FinishedTransfer(NamedTuple):
    is_out: bool
    num_blocks: int
    seconds: float  # on the device


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of a token and its alternatives, best first."""

    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class SampledToken(NamedTuple):
    """Next token; undefined if `is_nan` (the logits were NaN)."""

    token_id: int
    is_nan: bool
    logprob: TokenLogprob | None


class PromptLogprobs(NamedTuple):
    span: LogprobSpan
    first: int  # position
    logprobs: tuple[TokenLogprob, ...]


class PooledPrompt(NamedTuple):
    group: SequenceGroup
    vector: bytes  # float32[H], unit length


@dataclass(frozen=True, slots=True)
class StepResult:
    """`sampled_sequences[i]` gets `token_ids[indptr[i] : indptr[i + 1]]`: its accepted drafts and the next token. With
    none, it recomputes its last token. `indptr` None: one token each."""

    token_ids: Seq[int]
    logprobs: Seq[TokenLogprob | None] | None = None  # one per token
    failed: frozenset[int] = frozenset()  # indices into `sampled_sequences` with NaN logits
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    pooled: tuple[PooledPrompt, ...] = ()
    indptr: Seq[int] | None = None

    @classmethod
    def of(cls, sampled: Iterable[SampledToken]) -> StepResult:
        sampled = list(sampled)
        failed = frozenset(index for index, token in enumerate(sampled) if token.is_nan)
        return cls([token.token_id for token in sampled], [token.logprob for token in sampled], failed)

    def sampled_tokens(self) -> Iterator[SampledToken]:
        for index, token_id in enumerate(self.token_ids):
            logprob = None if self.logprobs is None else self.logprobs[index]
            yield SampledToken(token_id, index in self.failed, logprob)
