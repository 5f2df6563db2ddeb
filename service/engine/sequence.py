"""A request while it runs: its tokens, how far they are computed, and the blocks that hold them."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import Enum, auto

from model.sampler import sampling_record
from model.sampling_params import SamplingParams
from service.errors import EndReason


@dataclass(frozen=True, kw_only=True)
class BranchPast:
    """What another engine has already told of a branch: this one goes on behind it."""

    token_ids: tuple[int, ...] = ()
    end: EndReason | None = None
    sum_logprob: float = 0.0  # of the tokens, where the request ranks its branches


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the engine is asked to do, in token terms."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: str = ""  # prompts share blocks only with prompts of the same salt
    past: tuple[BranchPast, ...] = ()  # by branch, what was told before this engine; empty: nothing


BRANCH = 0
"""Which of a request's branches a sequence is: every request has one."""


class State(Enum):
    """WAITING sequences hold no blocks; RUNNING ones do; ENDED ones never come back."""

    WAITING = auto()
    RUNNING = auto()
    ENDED = auto()


TRANSITIONS: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.RUNNING, State.ENDED}),
    State.RUNNING: frozenset({State.WAITING, State.ENDED}),
    State.ENDED: frozenset(),
}


class Sequence:
    """Runs until `num_computed_tokens` reaches `num_tokens`; prefill, chunk, decode and recovery are only distances.

    `num_pending_tokens` of its tokens are sampled by steps that are still under way: they count, and nobody knows them.
    """

    def __init__(self, request: Request):
        self.request = request
        self.request_id = request.request_id
        self.sampling = request.sampling
        self.sampling_record = sampling_record(request.sampling, BRANCH)
        self.has_penalties = request.sampling.has_penalties
        self.token_ids = list(request.prompt)
        self.num_prompt_tokens = len(request.prompt)
        self.max_num_tokens = len(request.prompt) + request.sampling.max_tokens
        self.num_computed_tokens = 0
        self.num_pending_tokens = 0
        self.num_cached_tokens: int | None = None  # of the prompt, found in memory when it first ran
        self.block_table = array("i")
        self._state = State.WAITING

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending_tokens - self.num_computed_tokens

    @property
    def state(self) -> State:
        return self._state

    def become(self, state: State) -> None:
        """Move along the transition table; anything else is a bug."""
        if state not in TRANSITIONS[self._state]:
            raise AssertionError(f"{self.request_id}: {self._state.name} cannot become {state.name}")
        self._state = state

    @property
    def is_full(self) -> bool:
        """With its pending tokens it is as long as it may get: it ends once they are known."""
        return len(self.token_ids) + self.num_pending_tokens >= self.max_num_tokens

    def end_after(self, token_id: int, eos_token_ids: frozenset[int]) -> EndReason | None:
        """Why the sequence ends now that `token_id` is its last token; None if it goes on."""
        wishes = self.sampling
        if self.num_output_tokens >= wishes.min_tokens and (
            token_id in wishes.stop_token_ids or (token_id in eos_token_ids and not wishes.ignore_eos)
        ):
            return EndReason.STOP
        if len(self.token_ids) >= self.max_num_tokens:
            return EndReason.LENGTH
        return None
