"""What one step does (StepPlan) and what it returned (StepResult). The scheduler decides; execution decides nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from service.engine.sequence import Sequence, SequenceGroup


class Chunk(NamedTuple):
    """`length` tokens of a sequence from position `start`; their blocks are already in its table.

    `samplers` each get tokens from the logits of the chunk's last token: none if the chunk ends before the sequence
    does, else the sequence and the branches that fork from it there. The last of its tokens may be `drafts`, guesses of
    the sequence's next ones: then its only sampler gets a token from the logits of the token preceding each draft as
    well, for as long as the drafts are right.
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
    """Prompt positions `start` to `stop` (exclusive) of a chunk whose logits score the prompt's next tokens."""

    chunk: Chunk
    start: int
    stop: int


class PoolSpan(NamedTuple):
    """Prompt positions `start` to `stop` (exclusive) of a chunk whose hidden states are pooled."""

    chunk: Chunk
    start: int
    stop: int


class BlockCopy(NamedTuple):
    """Copy block `source` to block `target`."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The work of one step. One-token chunks come first (see model.batch.Batch). `copies` run in order, before anything
    is written. Then `swap_outs` (GPU to host) and `swap_ins` (host to GPU) start, one transfer each, and run while the
    chunks are computed."""

    chunks: tuple[Chunk, ...]
    copies: tuple[BlockCopy, ...] = ()
    swap_outs: tuple[BlockCopy, ...] = ()
    swap_ins: tuple[BlockCopy, ...] = ()
    logprob_spans: tuple[LogprobSpan, ...] = ()
    pool_spans: tuple[PoolSpan, ...] = ()
    changed_tables: tuple[Chunk, ...] = ()
    """One-token chunks whose block table may differ from the previous plan's; a sequence that was not a one-token chunk
    of that plan may be left out."""
    samplers: list[Sequence] = field(init=False)
    """All sequences that get a token, in the order of StepResult."""

    def __post_init__(self):
        object.__setattr__(self, "samplers", [sampler for chunk in self.chunks for sampler in chunk[3]])

    @property
    def num_decodes(self) -> int:
        """Number of one-token chunks."""
        count = len(self.chunks)
        while count and self.chunks[count - 1].length > 1:
            count -= 1
        return count

    @property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)


class FinishedTransfer(NamedTuple):
    """A plan's `swap_outs` or `swap_ins`, all done."""

    is_out: bool
    num_blocks: int
    seconds: float  # of the device


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of a token and of its best alternatives, best first."""

    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class SampledToken(NamedTuple):
    """The next token of a sequence. If `is_nan`, the model returned NaN and the id means nothing."""

    token_id: int
    is_nan: bool
    logprob: TokenLogprob | None


class PromptLogprobs(NamedTuple):
    """Log-probabilities of consecutive prompt tokens."""

    span: LogprobSpan
    first: int  # position
    logprobs: tuple[TokenLogprob, ...]


class PooledPrompt(NamedTuple):
    """The embedding of a completely computed prompt."""

    group: SequenceGroup
    vector: bytes  # float32[H], of length 1


@dataclass(frozen=True, slots=True)
class StepResult:
    """Tokens for each of the plan's samplers, in order; prompt log-probabilities, in parts; embeddings of the prompts
    that are complete.

    Sampler i gets `token_ids[indptr[i] : indptr[i + 1]]`: its accepted drafts and the token after them. Without tokens
    it computes its last token again. `indptr` None: exactly one token each.
    """

    token_ids: Seq[int]
    logprobs: Seq[TokenLogprob | None] | None = None  # one a token; None: none requested
    failed: frozenset[int] = frozenset()  # indices of samplers whose logits were NaN
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    pooled: tuple[PooledPrompt, ...] = ()
    indptr: Seq[int] | None = None

    @classmethod
    def of(cls, sampled: Iterable[SampledToken]) -> StepResult:
        """Build a result from one SampledToken for each sampler."""
        sampled = list(sampled)
        failed = frozenset(index for index, token in enumerate(sampled) if token.is_nan)
        return cls([token.token_id for token in sampled], [token.logprob for token in sampled], failed)

    @classmethod
    def of_runs(cls, runs: Iterable[Seq[SampledToken]]) -> StepResult:
        """Build a result from any number of SampledTokens for each sampler."""
        runs = list(runs)
        sampled = [token for run in runs for token in run]
        return cls(
            token_ids=[token.token_id for token in sampled],
            logprobs=[token.logprob for token in sampled],
            failed=frozenset(index for index, run in enumerate(runs) if any(token.is_nan for token in run)),
            indptr=[0, *accumulate(map(len, runs))],
        )

    def sampled_tokens(self) -> Iterator[SampledToken]:
        """Yield the tokens one by one, as `of` takes them."""
        for index, token_id in enumerate(self.token_ids):
            logprob = None if self.logprobs is None else self.logprobs[index]
            yield SampledToken(token_id, index in self.failed, logprob)
