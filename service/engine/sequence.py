"""A request while it runs: one sequence, or several branches that begin alike; their tokens, how far they are computed,
and the blocks that hold them."""

from __future__ import annotations

from array import array
from enum import Enum, auto

from model.grammar_matcher import Matcher
from model.sampler import SeenTokens, is_shaped, sampling_record
from model.sampling_params import SamplingParams
from service.engine.request import BranchHistory, EngineRequest
from service.errors import ENDINGS, EndReason


class SequenceStatus(Enum):
    """WAITING sequences hold no blocks; RUNNING ones do; ENDED ones never come back."""

    WAITING = auto()
    RUNNING = auto()
    ENDED = auto()


TRANSITIONS: dict[SequenceStatus, frozenset[SequenceStatus]] = {
    SequenceStatus.WAITING: frozenset({SequenceStatus.RUNNING, SequenceStatus.ENDED}),
    SequenceStatus.RUNNING: frozenset({SequenceStatus.WAITING, SequenceStatus.ENDED}),
    SequenceStatus.ENDED: frozenset(),
}


class Sequence:
    """Runs until `num_computed_tokens` reaches `num_tokens`; prefill, chunk, decode and recovery are only distances.

    `num_pending_tokens` of its tokens are sampled by steps that are still under way: they count, and nobody knows them.
    What branches of one request have in common is computed by one of them, their leader: its followers hold nothing
    (they are *parked*) until it has come to where they part from it.
    """

    def __init__(self, group: SequenceGroup, branch: int, num_alternatives: int | None):
        """`num_alternatives`: how many tokens are to be told with their log-probabilities beside each chosen one;
        None: not even that one's."""
        request, params = group.request, group.request.sampling
        self.group = group
        self.request = request
        self.request_id = request.request_id
        self.branch = branch
        self.sampling = params
        self.num_alternatives = num_alternatives
        self.sampling_record = sampling_record(params, branch, num_alternatives)
        self.cannot_run_ahead = params.beam is not None
        """No step computes it before the tokens of the one before are known."""
        self.needs_previous_tokens = params.has_penalties or params.grammar is not None
        """A step computes it before, but draws its token only after."""
        self.has_logit_processors = is_shaped(params)
        self.has_adjusted_logprobs = params.beam is not None and (
            self.has_logit_processors or params.grammar is not None
        )
        """Penalties, biases and mask apply to its log-probabilities, not to its logits."""
        self.emits_only_tokens = params.beam is None and params.grammar is None and num_alternatives is None
        """Its tokens are all there is to tell of it; whether it ends with one, that token and their number say."""
        self.matcher: Matcher | None = None  # of its grammar, if it has one, at its last known token
        self._seen: SeenTokens | None = None
        self.token_ids = array("I", request.prompt)
        """No list: the collector would walk all tokens there are, in a step now and then, for tens of milliseconds."""
        self.num_prompt_tokens = len(request.prompt)
        self.max_num_tokens = len(request.prompt) + params.max_tokens
        self.num_computed_tokens = 0
        self.num_tokens_before_preemption = (
            0  # before it had to leave: what of them is not found again is computed again
        )
        self.num_pending_tokens = 0
        self.num_exclusive_tokens = 0
        """Up to here the blocks in its table are its own to write to, from the first uncomputed token on: the memory
        need not be asked. 0 where that is not sure, or where the table is not what it was in the last plan."""
        self.block_table = array("i")
        self.end: EndReason | None = None
        self.samplers: tuple[Sequence, ...] = (self,)
        """Who gets a token from the logits of its last one: besides itself, followers that part from it there."""
        self.prefix_followers: list[Sequence] = []
        self.is_waiting_for_leader = False
        self.num_inherited_tokens = 0  # while parked: those it will not compute by itself
        self.status = SequenceStatus.WAITING
        """Read it; `become` changes it."""

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
        """What its penalties are about; None where it has none."""
        if not self.sampling.has_penalties:
            return None
        if self._seen is None or self._seen.of is not self.token_ids:  # a beam went on with another's tokens
            self._seen = SeenTokens(self.token_ids, self.num_prompt_tokens)
        return self._seen

    def set_status(self, status: SequenceStatus) -> None:
        """Move along the transition table; anything else is a bug."""
        if status not in TRANSITIONS[self.status]:
            raise AssertionError(f"{self.request_id}: {self.status.name} cannot become {status.name}")
        self.status = status

    def share_prefix_with(self, others: list[Sequence]) -> None:
        """These branches, which hold nothing, wait until this one has come to where they part from it."""
        for other in others:
            other.is_waiting_for_leader = True
            other.num_inherited_tokens = _num_inherited_tokens(self, other)
        with_it = [other for other in others if other.num_inherited_tokens == other.num_tokens]
        self.samplers, self.prefix_followers = (self, *with_it), others

    def end_after(self, token_id: int) -> EndReason | None:
        """Why the sequence ends now that `token_id` is its last token; None if it goes on."""
        num_tokens = len(self.token_ids)
        if token_id in self.group.stop_ids and num_tokens - self.num_prompt_tokens >= self.sampling.min_tokens:
            return EndReason.STOP
        return EndReason.LENGTH if num_tokens >= self.max_num_tokens else None


class SequenceGroup:
    """The branches of one request hold blocks together or not at all: a group runs or waits as one."""

    def __init__(self, request: EngineRequest, eos_token_ids: frozenset[int]):
        params = request.sampling
        self.request = request
        self.request_id = request.request_id
        self.tenant = request.tenant
        self.num_prompt_tokens = len(request.prompt)
        self.stop_ids = stop_ids(params, eos_token_ids)
        count = self._num_alternatives()
        self.branches = [Sequence(self, branch, count) for branch in range(params.num_branches)]
        self.num_output_tokens = 0
        self.num_cached_tokens: int | None = None  # of the prompt, found in memory when it first ran
        self.has_sampled = False  # in this engine
        self.num_scored_tokens = request.num_scored_tokens  # of the prompt, the first one included
        self.num_pooled_tokens = 0  # of the prompt: what its vector is made of is known, or under way, up to here
        self.embedding = b""  # its vector, once it is known; none is wanted in most groups
        self.is_ready = True  # to run: its grammar, if it has one, is compiled
        self.arrival = 0  # its number among all that have come to the scheduler
        self._sums_logprob = [0.0] * len(self.branches)
        for sequence, history in zip(self.branches, self._history(), strict=False):
            sequence.token_ids.extend(history.token_ids)
            sequence.end = history.end
            self.num_output_tokens += len(history.token_ids)
            self._sums_logprob[sequence.branch] = history.sum_logprob

    @property
    def live(self) -> list[Sequence]:
        """The branches that have not ended; the first of them is the one that others may follow."""
        return [sequence for sequence in self.branches if sequence.status is not SequenceStatus.ENDED]

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of its prompt are wanted and not all under way."""
        wanted = self.request.sampling.prompt_logprobs is not None
        return wanted and max(1, self.num_scored_tokens) < self.num_prompt_tokens

    @property
    def wants_pooling(self) -> bool:
        """Whether a vector of its prompt is wanted and not all under way."""
        return self.request.sampling.pooling is not None and self.num_pooled_tokens < self.num_prompt_tokens

    @property
    def has_pending_tokens(self) -> bool:
        return any(sequence.num_pending_tokens for sequence in self.branches)

    def max_num_blocks(self, block_size: int) -> int:
        """What the group holds at most at once: all branches at full length, with nothing but the prompt in common."""
        whole = -(-(self.num_prompt_tokens + self.request.sampling.max_tokens) // block_size)
        shared = (self.num_prompt_tokens - 1) // block_size
        return whole + (len(self.branches) - 1) * (whole - shared)

    def append(self, sequence: Sequence, token_id: int, logprob: float) -> EndReason | None:
        """The branch's next token, and its log-probability where the branches are ranked; why the branch ends with it,
        if it does."""
        sequence.token_ids.append(token_id)
        self.num_output_tokens += 1
        self._sums_logprob[sequence.branch] += logprob
        reason = sequence.end_after(token_id)
        if sequence.matcher is None:
            return reason
        if sequence.matcher.has_failed:
            return EndReason.GRAMMAR  # the token was drawn from all of them, and may be EOS
        if reason is EndReason.STOP:
            return reason
        # Within min_tokens one that ends an answer is drawn only where nothing else is allowed (see model.sampler).
        may_end = token_id in self.stop_ids and sequence.matcher.is_complete
        if not sequence.matcher.advance((token_id,)):
            return EndReason.STOP if may_end else EndReason.GRAMMAR
        return EndReason.STOP if sequence.matcher.is_finished else reason

    def choices(self) -> tuple[int, ...]:
        """The branches to answer with once all have ended, the best first."""
        good = [one for one in self.branches if one.end is not None and ENDINGS[one.end].finish_reason is not None]
        if self.request.sampling.ranks_branches:
            good.sort(key=lambda one: -self._sums_logprob[one.branch] / max(1, one.num_output_tokens))
        return tuple(one.branch for one in good[: self.request.sampling.n])

    def wait_for_leader(self) -> None:
        """The group is about to run: all live branches but the first wait until that one has computed what they have
        in common with it."""
        leader, *others = self.live
        leader.share_prefix_with(others)

    def stop_sharing(self) -> None:
        """The group holds nothing any more: nobody waits for anybody."""
        for sequence in self.live:
            sequence.is_waiting_for_leader = False
            sequence.share_prefix_with([])

    def clear_references(self) -> None:
        """Its end is told. What holds each other would stay in memory until the collector came, and newcomers would
        have to have theirs from the system: a page of it costs as much as a hundred calls."""
        for sequence in self.branches:
            sequence.samplers, sequence.prefix_followers = (), []
        self.branches = []

    def _num_alternatives(self) -> int | None:
        params = self.request.sampling
        return 0 if params.logprobs is None and params.ranks_branches else params.logprobs

    def _history(self) -> tuple[BranchHistory, ...]:
        """What this engine need not do again."""
        return self.request.history


def stop_ids(params: SamplingParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """The tokens that end an answer."""
    return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)


def _num_inherited_tokens(leader: Sequence, other: Sequence) -> int:
    """Tokens that `other` need not compute behind this leader: what they have in common, but the last one of `other`
    only if both are to sample from it."""
    ours, theirs = leader.token_ids, other.token_ids
    count, end = other.num_prompt_tokens, min(len(ours), len(theirs))
    while count < end and ours[count] == theirs[count]:
        count += 1
    if count == len(theirs) and len(ours) > count:
        count -= 1
    return count
