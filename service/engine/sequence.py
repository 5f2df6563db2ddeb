from __future__ import annotations

from array import array
from enum import Enum, auto

from model.sampler import SeenTokens, has_logit_processors, sampling_record
from model.sampling_params import SamplingParams
from model.text.grammar_matcher import Matcher
from model.text.token_rules import RulesMatcher
from model.weights.lora.adapter import LoraAdapter
from service.engine.request import BranchHistory, EngineRequest
from service.errors import ENDINGS, EndReason


class SequenceStatus(Enum):
    """Status of a sequence. Only RUNNING ones hold blocks."""

    WAITING = auto()
    RUNNING = auto()
    ENDED = auto()


TRANSITIONS: dict[SequenceStatus, frozenset[SequenceStatus]] = {
    SequenceStatus.WAITING: frozenset({SequenceStatus.RUNNING, SequenceStatus.ENDED}),
    SequenceStatus.RUNNING: frozenset({SequenceStatus.WAITING, SequenceStatus.ENDED}),
    SequenceStatus.ENDED: frozenset(),
}


class Sequence:
    """Branch that runs until `num_computed_tokens` reaches `num_tokens`: prefill, decode and recovery alike.

    The ids of `num_pending_tokens` are still on the device. The leader computes the common prefix; followers hold no
    blocks (`is_waiting_for_leader`) until they diverge.
    """

    def __init__(self, group: SequenceGroup, branch: int, num_alternatives: int | None):
        """`num_alternatives`: alternatives per log-probability; None: no log-probabilities."""
        request, params = group.request, group.request.sampling
        self.group = group
        self.request = request
        self.request_id = request.request_id
        self.branch = branch
        self.sampling = params
        self.num_alternatives = num_alternatives
        self.sampling_record = sampling_record(params, branch, num_alternatives)
        self.cannot_run_ahead = params.beam is not None
        """Beams choose the next step from the last ids."""
        self.needs_previous_tokens = params.has_penalties or params.is_masked
        self.has_logit_processors = has_logit_processors(params)
        self.has_adjusted_logprobs = params.beam is not None and (self.has_logit_processors or params.is_masked)
        """Adjustments apply to log-probabilities, not logits."""
        self.emits_only_tokens = params.beam is None and not params.is_masked and num_alternatives is None
        """The last id and the length alone decide its end."""
        self.matcher: Matcher | RulesMatcher | None = None  # state after the last known token
        self.draft_source = ""  # of its last drafts
        self._seen: SeenTokens | None = None
        self.token_ids = array("I", request.prompt)
        """An array: the garbage collector would walk a list."""
        self.num_prompt_tokens = len(request.prompt)
        self.max_num_tokens = len(request.prompt) + params.max_tokens
        self.num_computed_tokens = 0
        self.num_tokens_before_preemption = 0
        self.num_pending_tokens = 0
        self.num_exclusive_tokens = 0
        """Uncomputed tokens up to here have exclusive blocks; 0 if unknown."""
        self.block_table = array("i")
        self.end: EndReason | None = None
        self.sampled_sequences: tuple[Sequence, ...] = (self,)
        """Itself, and followers that diverge after its last token."""
        self.prefix_followers: list[Sequence] = []
        self.is_waiting_for_leader = False
        self.num_inherited_tokens = 0
        self.status = SequenceStatus.WAITING

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending_tokens - self.num_computed_tokens

    def seen_tokens(self) -> SeenTokens | None:
        """Return token counts; None without penalties."""
        if not self.sampling.has_penalties:
            return None
        if self._seen is None or self._seen.of is not self.token_ids:  # a beam forked
            self._seen = SeenTokens(self.token_ids, self.num_prompt_tokens)
        return self._seen

    def set_status(self, status: SequenceStatus) -> None:
        """Raise AssertionError unless TRANSITIONS allows it."""
        if status not in TRANSITIONS[self.status]:
            raise AssertionError(f"{self.request_id}: {self.status.name} cannot become {status.name}")
        self.status = status

    def share_prefix_with(self, others: list[Sequence]) -> None:
        for other in others:
            other.is_waiting_for_leader = True
            other.num_inherited_tokens = _num_inherited_tokens(self, other)
        with_it = [other for other in others if other.num_inherited_tokens == other.num_tokens]
        self.sampled_sequences, self.prefix_followers = (self, *with_it), others

    def end_after(self, token_id: int) -> EndReason | None:
        """Return why the last token ends the sequence, or None."""
        num_tokens = len(self.token_ids)
        if token_id in self.group.stop_ids and num_tokens - self.num_prompt_tokens >= self.sampling.min_tokens:
            return EndReason.STOP
        return EndReason.LENGTH if num_tokens >= self.max_num_tokens else None


class SequenceGroup:
    """Branches of one request; all hold blocks or none does."""

    def __init__(self, request: EngineRequest, eos_token_ids: frozenset[int], first_rope_row: int = 0):
        """`first_rope_row`: row of RopeTables for position 0."""
        params = request.sampling
        self.request = request
        self.first_rope_row = first_rope_row
        self.request_id = request.request_id
        self.tenant = request.tenant
        self.num_prompt_tokens = len(request.prompt)
        self.stop_ids = stop_ids(params, eos_token_ids)
        count = self._num_alternatives()
        self.branches = [Sequence(self, branch, count) for branch in range(params.num_branches)]
        self.num_output_tokens = 0
        self.num_draft_tokens = self.num_accepted_tokens = 0
        self.num_cached_tokens: int | None = None  # at the first run
        self.has_sampled = False
        self.num_scored_tokens = request.num_scored_tokens
        self.num_pooled_tokens = 0
        self.embedding = b""  # float32[H] once complete
        self.is_compiled = True  # the grammar
        self.is_loaded = True  # the adapter
        self.adapter: LoraAdapter | None = None  # once loaded
        self.adapter_slot: int | None = None  # while running
        self.arrival = 0
        self._sums_logprob = [0.0] * len(self.branches)
        for sequence, history in zip(self.branches, self._history(), strict=False):
            sequence.token_ids.extend(history.token_ids)
            sequence.end = history.end
            self.num_output_tokens += len(history.token_ids)
            self._sums_logprob[sequence.branch] = history.sum_logprob

    @property
    def is_ready(self) -> bool:
        return self.is_compiled and self.is_loaded

    @property
    def adapter_key(self) -> str:
        """Return the adapter's digest; "" for the base model."""
        return "" if self.request.adapter is None else self.request.adapter.digest

    @property
    def live(self) -> list[Sequence]:
        return [sequence for sequence in self.branches if sequence.status is not SequenceStatus.ENDED]

    @property
    def wants_prompt_logprobs(self) -> bool:
        wanted = self.request.sampling.prompt_logprobs is not None
        return wanted and max(1, self.num_scored_tokens) < self.num_prompt_tokens

    @property
    def wants_pooling(self) -> bool:
        return self.request.sampling.pooling is not None and self.num_pooled_tokens < self.num_prompt_tokens

    @property
    def has_pending_tokens(self) -> bool:
        return any(sequence.num_pending_tokens for sequence in self.branches)

    def max_num_blocks(self, block_size: int) -> int:
        """Count blocks at full length, sharing only the prompt."""
        whole = -(-(self.num_prompt_tokens + self.request.sampling.max_tokens) // block_size)
        shared = (self.num_prompt_tokens - 1) // block_size
        return whole + (len(self.branches) - 1) * (whole - shared)

    def append(self, sequence: Sequence, token_id: int, logprob: float) -> EndReason | None:
        """Append a token; return why the branch ends, or None. `logprob` ranks branches."""
        sequence.token_ids.append(token_id)
        self.num_output_tokens += 1
        self._sums_logprob[sequence.branch] += logprob
        reason = sequence.end_after(token_id)
        if sequence.matcher is None:
            return reason
        if sequence.matcher.has_failed:
            return EndReason.GRAMMAR  # sampled without a mask; may be EOS
        if reason is EndReason.STOP:
            return reason
        # Before min_tokens, a stop id is sampled only if the grammar allows nothing else.
        may_end = token_id in self.stop_ids and sequence.matcher.is_complete
        if not sequence.matcher.advance((token_id,)):
            return EndReason.STOP if may_end else EndReason.GRAMMAR
        return EndReason.STOP if sequence.matcher.is_finished else reason

    def choices(self) -> tuple[int, ...]:
        """Return the branches to answer with, best first."""
        good = [one for one in self.branches if one.end is not None and ENDINGS[one.end].finish_reason is not None]
        if self.request.sampling.ranks_branches:
            good.sort(key=lambda one: -self._sums_logprob[one.branch] / max(1, one.num_output_tokens))
        return tuple(one.branch for one in good[: self.request.sampling.n])

    def wait_for_leader(self) -> None:
        leader, *others = self.live
        leader.share_prefix_with(others)

    def stop_sharing(self) -> None:
        for sequence in self.live:
            sequence.is_waiting_for_leader = False
            sequence.share_prefix_with([])

    def clear_references(self) -> None:
        """Break cycles, so that memory is freed without the garbage collector."""
        for sequence in self.branches:
            sequence.sampled_sequences, sequence.prefix_followers = (), []
        self.branches = []

    def _num_alternatives(self) -> int | None:
        params = self.request.sampling
        return 0 if params.logprobs is None and params.ranks_branches else params.logprobs

    def _history(self) -> tuple[BranchHistory, ...]:
        return self.request.history


def stop_ids(params: SamplingParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)


def _num_inherited_tokens(leader: Sequence, other: Sequence) -> int:
    # The common prefix, including the last token of `other` only if both sample from it.
    ours, theirs = leader.token_ids, other.token_ids
    count, end = other.num_prompt_tokens, min(len(ours), len(theirs))
    while count < end and ours[count] == theirs[count]:
        count += 1
    if count == len(theirs) and len(ours) > count:
        count -= 1
    return count
