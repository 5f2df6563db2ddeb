"""An executor without a model: the next token is a function of the tokens so far, and the memory behind the block
tables is a plain list, so that a block in two tables or a lost write shows as a wrong token."""

from __future__ import annotations

import functools
import hashlib
import math
import time
from array import array
from dataclasses import replace
from itertools import accumulate, chain

from service.engine.drafting.drafter import NGRAM
from service.engine.sequence import Sequence
from service.engine.step import Chunk, FinishedTransfer, SampledToken, StepPlan, StepResult, TokenLogprob

VOCAB_SIZE = 97


def next_token(token_ids: list[int], branch: int = 0) -> int:
    """Return the scripted model's next token in this branch."""
    return _hashed((token_ids, branch) if branch else token_ids) % VOCAB_SIZE


def logprobs_after(token_ids: list[int]) -> tuple[float, ...]:
    """Return the scripted model's log-probability of each next token."""
    return _logprobs_after(tuple(token_ids))


@functools.lru_cache(maxsize=1 << 14)
def _logprobs_after(token_ids: tuple[int, ...]) -> tuple[float, ...]:
    weights = [1 + _hashed((list(token_ids), "weight", token)) % 1000 for token in range(VOCAB_SIZE)]
    total = sum(weights)
    return tuple(math.log(weight / total) for weight in weights)


def _hashed(value: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=4).digest())


class ScriptedExecutor:
    """Executor that writes tokens into blocks as a model writes keys, and predicts from the blocks' contents.

    Pending tokens are known to it alone, as on a device. It rereads the block table of a sequence that decodes in
    consecutive plans only if the plan lists it as changed.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        nan_after: int | None = None,
        runs_ahead: bool = False,
        step_s: float = 0.0,
        num_host_blocks: int = 0,
        transfer_steps: int = 0,
        silent_every: int = 0,
    ):
        """`silent_every`: every n-th chunk with drafts gets no token; 0: none. `transfer_steps`: transfers take effect
        when the engine has polled this many times; with 0 at once, before their step is computed. A real transfer may
        read and write at any time in between."""
        self.memory: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.block_size = block_size
        self.plans: list[StepPlan] = []
        self.runs_ahead = runs_ahead
        self._nan_after = nan_after
        self._step_s = step_s
        self._silent_every, self._num_verified = silent_every, 0
        self._last: dict[Sequence, int] = {}
        self._tables: dict[Sequence, array] = {}
        self.num_host_blocks = num_host_blocks
        self.host_memory: list[list[int | None]] = [[None] * block_size for _ in range(num_host_blocks)]
        self._transfer_steps = transfer_steps
        self._transfers: list[list] = []  # polls, is out, copies

    def launch(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        time.sleep(self._step_s)
        self.transfer(plan)
        tables = self._tables_of(plan)
        for chunk in plan.chunks:
            for position in range(chunk.start, chunk.end):
                block = tables[chunk.sequence][position // self.block_size]
                self.memory[block][position % self.block_size] = self._token(chunk, position)
        runs = {
            sequence: self._run(chunk, sequence, tables[chunk.sequence])
            for chunk in plan.chunks
            for sequence in chunk.sampled_sequences
        }
        self._last = {sequence: run[-1].token_id for sequence, run in runs.items() if run}
        if all(len(run) == 1 for run in runs.values()):
            return StepResult.of(run[0] for run in runs.values())
        failed = frozenset(index for index, run in enumerate(runs.values()) if any(token.is_nan for token in run))
        indptr = [0, *accumulate(map(len, runs.values()))]
        return replace(StepResult.of(chain(*runs.values())), failed=failed, indptr=indptr)

    def transfer(self, plan: StepPlan) -> None:
        for source, target in plan.copies:
            self.memory[target] = list(self.memory[source])
        asked = [[0, is_out, copies] for is_out, copies in ((True, plan.swap_outs), (False, plan.swap_ins)) if copies]
        self._transfers += asked
        if not self._transfer_steps:
            self._arrive(asked)

    def sample(self, launched: StepResult) -> None:
        """Do nothing: all tokens are known at launch."""

    def collect(self, launched: StepResult) -> StepResult:
        return launched

    def finished_transfers(self) -> list[FinishedTransfer]:
        for transfer in self._transfers:
            transfer[0] += 1
        done = [transfer for transfer in self._transfers if transfer[0] > self._transfer_steps]
        self._transfers = [transfer for transfer in self._transfers if transfer[0] <= self._transfer_steps]
        if self._transfer_steps:
            self._arrive(done)
        return [FinishedTransfer(is_out, len(copies), 1e-4 * len(copies)) for _, is_out, copies in done]

    def wait_for_transfer(self) -> None:
        self._transfers[0][0] = self._transfer_steps

    def _tables_of(self, plan: StepPlan) -> dict[Sequence, array]:
        kept, changed = self._tables, {chunk.sequence for chunk in plan.changed_tables}
        decodes = {chunk.sequence for chunk in plan.chunks[: plan.num_decodes]}
        assert changed <= decodes, "longer chunks have no tables that stay"
        stays = (decodes - changed) & kept.keys()
        sequences = [chunk.sequence for chunk in plan.chunks]
        tables = {one: kept[one] if one in stays else one.block_table[:] for one in sequences}
        self._tables = {one: tables[one] for one in decodes}
        return tables

    def _arrive(self, transfers: list[list]) -> None:
        for _, is_out, copies in transfers:
            sources, targets = (self.memory, self.host_memory) if is_out else (self.host_memory, self.memory)
            for source, target in copies:
                targets[target] = list(sources[source])

    def _token(self, chunk: Chunk, position: int) -> int:
        known, num_known = chunk.sequence.token_ids, chunk.end - len(chunk.drafts)
        if position >= num_known:
            return chunk.drafts[position - num_known]
        return known[position] if position < len(known) else self._last[chunk.sequence]

    def _run(self, chunk: Chunk, sequence: Sequence, table: array) -> list[SampledToken]:
        """Sample after the known tokens, and after each draft that equals the preceding sample."""
        if chunk.drafts and self._is_silent():
            return []
        end = chunk.end - len(chunk.drafts)
        run = [self._sampled(end, sequence, table)]
        for draft in chunk.drafts:
            if run[-1].token_id != draft:
                break
            end += 1
            run.append(self._sampled(end, sequence, table))
        return run

    def _sampled(self, end: int, sequence: Sequence, table: array) -> SampledToken:
        cached = [self.memory[table[at // self.block_size]][at % self.block_size] for at in range(end)]
        token_id, count = next_token(cached, sequence.branch), sequence.num_alternatives
        if count is None:
            return SampledToken(token_id, cached[-1] == self._nan_after, None)
        logprobs = logprobs_after(cached)
        best = sorted(range(VOCAB_SIZE), key=lambda token: (-logprobs[token], token))[:count]
        logprob = TokenLogprob(logprobs[token_id], tuple(best), tuple(logprobs[token] for token in best))
        return SampledToken(token_id, cached[-1] == self._nan_after, logprob)

    def _is_silent(self) -> bool:
        self._num_verified += 1
        return self._silent_every > 0 and self._num_verified % self._silent_every == 0


class ScriptedDrafter:
    """Drafter of the scripted model's tokens, wrong at every `wrong_every`-th position."""

    def __init__(self, num_drafts: int, wrong_every: int = 3):
        self._num_drafts, self._wrong_every = num_drafts, wrong_every

    source, writes_cache, token_s = NGRAM, False, 0.0

    def draft(self, sequences: list[Sequence], max_tokens: list[int]) -> list[tuple[int, ...]]:
        return [self._draft(one, count) for one, count in zip(sequences, max_tokens, strict=True)]

    def on_end(self, sequence: Sequence) -> None:
        """Keep nothing."""

    def _draft(self, sequence: Sequence, max_tokens: int) -> tuple[int, ...]:
        tokens = list(sequence.token_ids)
        for _ in range(min(self._num_drafts, max_tokens)):
            tokens.append(next_token(tokens, sequence.branch))
        drafts = tokens[len(sequence.token_ids) :]
        first = sequence.num_tokens
        return tuple((token + ((first + at) % self._wrong_every == 0)) % VOCAB_SIZE for at, token in enumerate(drafts))
