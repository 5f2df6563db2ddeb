"""What one step does (StepPlan) and what it returns (StepResult)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from service.engine.sequence import Sequence, SequenceGroup


class Chunk(NamedTuple):
    """`length` tokens of a sequence from position `start`, whose blocks are in its table.

    `samplers` sample from the last token's logits: the sequence and branches that fork there; none before the end of
    the sequence. The last tokens may be `drafts`, guesses of the next ones: then the only sampler gets a token for each
    right draft, and another one.
    """

    sequence: Sequence
    start: int
    length: int
    samplers: tuple[Sequence, ...]
    drafts: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """Position after the last token, drafts included."""
        return self.start + self.length


class LogprobSpan(NamedTuple):
    """Prompt positions `start` to `stop` (exclusive) whose logits score the next tokens."""

    chunk: Chunk
    start: int
    stop: int


class PoolSpan(NamedTuple):
    """Prompt positions `start` to `stop` (exclusive) whose hidden states are pooled."""

    chunk: Chunk
    start: int
    stop: int


class BlockCopy(NamedTuple):
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The work of one step; one-token chunks come first. `copies` run in order before any write. Then `swap_outs`
    (GPU to host) and `swap_ins` start, and run while the chunks are computed."""

    chunks: tuple[Chunk, ...]
    copies: tuple[BlockCopy, ...] = ()
    swap_outs: tuple[BlockCopy, ...] = ()
    swap_ins: tuple[BlockCopy, ...] = ()
    logprob_spans: tuple[LogprobSpan, ...] = ()
    pool_spans: tuple[PoolSpan, ...] = ()
    changed_tables: tuple[Chunk, ...] = ()
    """One-token chunks whose table changed since the previous plan, where the sequence was a one-token chunk too."""
    samplers: list[Sequence] = field(init=False)
    """In the order of StepResult."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "samplers", [sampler for chunk in self.chunks for sampler in chunk[3]])

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
    seconds: float  # of the device


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities of a token and of its alternatives, best first."""

    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class SampledToken(NamedTuple):
    """A sequence's next token; undefined if `is_nan`: the logits were NaN."""

    token_id: int
    is_nan: bool
    logprob: TokenLogprob | None


class PromptLogprobs(NamedTuple):
    span: LogprobSpan
    first: int  # position
    logprobs: tuple[TokenLogprob, ...]


class PooledPrompt(NamedTuple):
    group: SequenceGroup
    vector: bytes  # float32[H], of length 1


@dataclass(frozen=True, slots=True)
class StepResult:
    """Tokens of the plan's samplers, in order: sampler i gets `token_ids[indptr[i] : indptr[i + 1]]`, its accepted
    drafts and the token after them; with none it recomputes its last token. `indptr` None: one token each."""

    token_ids: Seq[int]
    logprobs: Seq[TokenLogprob | None] | None = None  # one a token; None: none requested
    failed: frozenset[int] = frozenset()  # indices of samplers whose logits were NaN
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    pooled: tuple[PooledPrompt, ...] = ()
    indptr: Seq[int] | None = None

    @classmethod
    def of(cls, sampled: Iterable[SampledToken]) -> StepResult:
        """Build a result of one token for each sampler."""
        sampled = list(sampled)
        failed = frozenset(index for index, token in enumerate(sampled) if token.is_nan)
        return cls([token.token_id for token in sampled], [token.logprob for token in sampled], failed)

    @classmethod
    def of_runs(cls, runs: Iterable[Seq[SampledToken]]) -> StepResult:
        """Build a result of any number of tokens for each sampler."""
        runs = list(runs)
        sampled = [token for run in runs for token in run]
        return cls(
            token_ids=[token.token_id for token in sampled],
            logprobs=[token.logprob for token in sampled],
            failed=frozenset(index for index, run in enumerate(runs) if any(token.is_nan for token in run)),
            indptr=[0, *accumulate(map(len, runs))],
        )

    def sampled_tokens(self) -> Iterator[SampledToken]:
        """Yield what `of` takes."""
        for index, token_id in enumerate(self.token_ids):
            logprob = None if self.logprobs is None else self.logprobs[index]
            yield SampledToken(token_id, index in self.failed, logprob)
