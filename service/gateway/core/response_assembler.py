"""Assembles one job's response: turns events into `ChoiceDelta`s, identically in every gateway."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from model.text.reasoning import ReasoningState, ReasoningStream
from service.errors import ENDINGS, EndReason
from service.gateway.core.request import GenerationRequest
from service.gateway.core.served_model import ServedModel
from service.gateway.core.text_stream import DecodedText, TextStream, without_end_token
from service.queue.codec import unpack_floats, unpack_ids
from service.queue.messages import Event, Part


@dataclass(frozen=True)
class TokenLogprob:
    """A token and the top tokens at its position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    is_silent: bool = False  # ends the response; not part of its text
    is_reasoning: bool = False  # not part of its text either


@dataclass(slots=True)  # creating a frozen one takes longer, and there is one per token
class ChoiceDelta:
    """The next part of one choice. Text may follow its tokens' `logprobs` later."""

    index: int  # of the choice within the request
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None  # OpenAI's value, in the choice's last delta
    num_tokens: int = 0  # generated since the previous delta
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # all prompt tokens but the first; in the choice's first delta
    reasoning: str = ""  # precedes `text`
    stop: str | int | None = None  # the stop string or id that ended the choice, in its last delta; None: EOS, length
    token_ids: tuple[int, ...] = ()  # the `num_tokens` generated, if requested


@dataclass(frozen=True)
class Outcome:
    """Token counts over all jobs."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int | None = None  # part of `completion_tokens`; None: reasoning is not parsed
    accepted_drafts: int = 0
    rejected_drafts: int = 0


class ResponseAssembler:
    """Turns one job's events into deltas. Events are pushed in order until `reason` is set."""

    def __init__(
        self,
        request: GenerationRequest,
        model: ServedModel,
        first_index: int = 0,
        reasoning: ReasoningState = ReasoningState.OFF,
    ) -> None:
        """`first_index`: the request-wide index of the job's first choice."""
        self._request = request
        self._reasoning = reasoning
        self._is_ranked = request.sampling.is_ranked
        self._model = model
        self._first_index = first_index
        self._silent_ids = _silent_ids(request, model)
        self._stop_ids = frozenset(request.sampling.stop_token_ids) - _end_ids(request, model)
        self._branches: dict[int, _Branch] = {}
        self._prompt_logprobs: list[TokenLogprob] = []  # complete before any branch has text
        self._started: set[int] = set()  # choices whose first delta was sent
        self._chosen: Sequence[int] = ()  # returned branches, best first; set on success
        self.num_tokens = 0
        self.cached_tokens = 0  # from the first event: a stop string may end the job before its last event
        self.accepted_drafts = self.rejected_drafts = 0  # from the last event
        self.embedding = b""  # float32[H], set at the end
        self.reason: EndReason | None = None
        """The last event's reason, or STOP once every choice ended with a stop string."""

    def push(self, event: Event) -> tuple[list[ChoiceDelta], list[int]]:
        """Return the event's deltas and the branches ended by a stop string."""
        stopped = []
        if event.number == 1 and event.usage is not None:
            self.cached_tokens = event.usage.cached_tokens
        for part in event.parts:
            if part.is_prompt:
                self._prompt_logprobs += _logprobs(part, unpack_ids(part.tokens))
                continue
            if self._request.only_echoes:
                part = Part(branch=part.branch, end=part.end)
            branch = self._branch(part.branch)
            if branch.finish_reason is None and branch.push(part, self._silent_ids):
                stopped.append(part.branch)
        if event.end is not None:
            self._end(event, event.end)
        deltas = self._ranked_deltas() if self._is_ranked else self._deltas_so_far()
        if self._prompt_logprobs:
            deltas = [self._with_prompt(delta) for delta in deltas]
        for delta in deltas:
            self.num_tokens += delta.num_tokens
        if self.reason is None and stopped and not self._is_ranked and self._has_every_end():
            self.reason = EndReason.STOP
        return deltas, stopped

    def _with_prompt(self, delta: ChoiceDelta) -> ChoiceDelta:
        if delta.index in self._started:
            return delta
        self._started.add(delta.index)
        return replace(delta, prompt_logprobs=tuple(self._prompt_logprobs))

    def _branch(self, number: int) -> _Branch:
        branch = self._branches.get(number)
        if branch is None:
            request, tokenizer = self._request, self._model.tokenizer
            reasoning = self._model.reasoning_stream(self._reasoning)
            shown_ids = frozenset() if reasoning is None else self._model.reasoning_ids
            # A completion continues its prompt, so it keeps a leading space.
            detokenizer = tokenizer.detokenizer(request.hides_special_tokens, request.begins_a_text, shown_ids)
            stop, include_stop = request.stop, request.include_stop_str_in_output
            text = TextStream(detokenizer, stop, include_stop, request.sampling.min_tokens)
            wants_logprobs = request.sampling.logprobs is not None or self._is_ranked
            form = _Form(wants_logprobs, request.has_token_ids, request.include_reasoning, self._stop_ids)
            branch = self._branches[number] = _Branch(text, reasoning, form)
        return branch

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Reasoning tokens of all branches; None: reasoning is not parsed."""
        if self._reasoning is ReasoningState.OFF:
            return None
        return sum(branch.num_reasoning_tokens for branch in self._branches.values())

    @property
    def most_tokens(self) -> int:
        """Token count of the longest branch."""
        return max((branch.num_tokens for branch in self._branches.values()), default=0)

    def _end(self, event: Event, reason: EndReason) -> None:
        self.reason = reason
        self.embedding = event.embedding or b""
        if event.usage is not None:
            self.accepted_drafts = event.usage.accepted_prediction_tokens or 0
            self.rejected_drafts = event.usage.rejected_prediction_tokens or 0
        word = ENDINGS[reason].finish_reason
        if word is None:
            return
        self._chosen = self._best(event)
        for number in self._chosen:
            self._branch(number).end(word)

    def _best(self, event: Event) -> Sequence[int]:
        """Return the chosen branches, best first: the worker also ranks by tokens after a stop string."""
        params, branches = self._request.sampling, self._branches
        if params.beam is None and self._is_ranked and self._request.stop:
            return sorted(branches, key=lambda number: (-branches[number].mean_logprob, number))[: params.n]
        return event.choices or range(params.n)

    def _deltas_so_far(self) -> list[ChoiceDelta]:
        deltas = []
        for number in sorted(self._branches):
            delta = self._branches[number].delta(self._first_index + number)
            if delta is not None:
                deltas.append(delta)
        return deltas

    def _ranked_deltas(self) -> list[ChoiceDelta]:
        """Return one delta per choice, at the end. Tokens of discarded branches count too."""
        chosen = self._chosen
        if not chosen:
            return []
        self.num_tokens += sum(b.num_unsent for number, b in self._branches.items() if number not in chosen)
        ranked = (self._branch(number).delta(self._first_index + rank) for rank, number in enumerate(chosen))
        return [delta for delta in ranked if delta is not None]

    def _has_every_end(self) -> bool:
        ended = sum(branch.finish_reason is not None for branch in self._branches.values())
        return ended == self._request.sampling.n


class _Form(NamedTuple):
    has_logprobs: bool
    has_token_ids: bool
    shows_reasoning: bool
    stop_ids: frozenset[int]  # the request's, without EOS


class _Branch:
    def __init__(self, text: TextStream, reasoning: ReasoningStream | None, form: _Form) -> None:
        self._text = text
        self._reasoning = reasoning  # None: all text is content
        self._form = form
        self.num_reasoning_tokens = 0
        self._unsent_reasoning = ""
        self._unsent = ""
        self._unsent_logprobs: list[TokenLogprob] = []
        self._unsent_ids: list[int] = []
        self._is_finish_sent = False
        self.num_unsent = 0  # tokens
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self._stop: str | int | None = None
        self._last_id: int | None = None

    def push(self, part: Part, silent_ids: frozenset[int]) -> bool:
        """Return whether a stop string ended the branch, which the worker cannot know."""
        ids = unpack_ids(part.tokens)
        self._last_id = ids[-1] if ids else self._last_id
        visible = without_end_token(ids, silent_ids)
        num_thought, decoded = self._decode(visible)
        stopped = decoded.stopped
        num_tokens = decoded.num_tokens if stopped else len(ids)
        self.num_unsent += num_tokens
        self.num_tokens += num_tokens
        if self._form.has_token_ids:
            self._unsent_ids += ids[:num_tokens]
        if self._form.has_logprobs:
            self._unsent_logprobs += _logprobs(part, ids[:num_tokens], num_thought, len(visible))
        if stopped:
            self.finish_reason, self._stop = _STOP, decoded.stop
        elif part.end is not None:
            self.end(ENDINGS[part.end].finish_reason)
        return stopped

    def end(self, finish_reason: str | None) -> None:
        if self.finish_reason is None:
            last = self._text.end()
            self._add(last.text, is_last=True)
            self.finish_reason, self._stop = (_STOP if last.stopped else finish_reason), last.stop
            if finish_reason == _STOP and not last.stopped and self._last_id in self._form.stop_ids:
                self._stop = self._last_id

    def _decode(self, ids: Sequence[int]) -> tuple[int, DecodedText]:
        """Decode `ids`; return also how many precede the content."""
        if self._reasoning is None:
            decoded = self._text.push(ids)
            self._unsent += decoded.text
            return 0, decoded
        num_pushed = 0
        while not self._reasoning.is_over and num_pushed < len(ids):
            decoded = self._text.push(ids[num_pushed : num_pushed + 1])
            was_open = self._reasoning.is_open
            self._add(decoded.text, is_last=decoded.stopped)
            self.num_reasoning_tokens += was_open or self._reasoning.is_open
            num_pushed += 1
            if decoded.stopped:
                return num_pushed, DecodedText("", num_pushed, decoded.stop)
        num_thought = num_pushed - (num_pushed > 0 and self._reasoning.is_over)
        decoded = self._text.push(ids[num_pushed:])
        self._add(decoded.text, is_last=decoded.stopped)
        return num_thought, decoded._replace(num_tokens=num_pushed + decoded.num_tokens)

    def _add(self, text: str, *, is_last: bool) -> None:
        if self._reasoning is None:
            self._unsent += text
            return
        parts = [self._reasoning.push(text), *([self._reasoning.flush()] if is_last else [])]
        for part in parts:
            self._unsent += part.content
            self._unsent_reasoning += part.reasoning if self._form.shows_reasoning else ""

    @property
    def mean_logprob(self) -> float:
        """Mean over unsent tokens, which are all tokens of a ranked branch."""
        scores = [one.logprob for one in self._unsent_logprobs]
        return sum(scores) / max(1, len(scores))

    def delta(self, index: int) -> ChoiceDelta | None:
        ends_now = self.finish_reason is not None and not self._is_finish_sent
        if not (self._unsent or self._unsent_reasoning or self._unsent_logprobs or self._unsent_ids or ends_now):
            return None
        delta = ChoiceDelta(
            index,
            self._unsent,
            tuple(self._unsent_logprobs),
            self.finish_reason if ends_now else None,
            self.num_unsent,
            reasoning=self._unsent_reasoning,
            stop=self._stop if ends_now else None,
            token_ids=tuple(self._unsent_ids),
        )
        self._is_finish_sent = self._is_finish_sent or ends_now
        self._unsent, self._unsent_reasoning, self._unsent_logprobs, self.num_unsent = "", "", [], 0
        self._unsent_ids = []
        return delta


_STOP = ENDINGS[EndReason.STOP].finish_reason


def _silent_ids(request: GenerationRequest, model: ServedModel) -> frozenset[int]:
    if request.include_stop_str_in_output:
        return frozenset()
    return _end_ids(request, model).union(request.sampling.stop_token_ids)


def _end_ids(request: GenerationRequest, model: ServedModel) -> frozenset[int]:
    """Return the EOS ids if they end the response."""
    return frozenset() if request.sampling.ignore_eos else frozenset(model.eos_token_ids)


def _logprobs(
    part: Part, ids: Sequence[int], num_thought: int = 0, num_visible: int | None = None
) -> list[TokenLogprob]:
    """Unpack log-probabilities. The first `num_thought` ids are reasoning; ids from `num_visible` on are not in the
    text."""
    if part.logprobs is None:
        return []
    chosen = unpack_floats(part.logprobs.chosen)
    top = list(zip(unpack_ids(part.logprobs.top_ids), unpack_floats(part.logprobs.top), strict=True))
    width = len(top) // len(chosen) if chosen else 0
    return [
        TokenLogprob(
            token,
            logprob,
            tuple(top[i * width : (i + 1) * width]),
            is_silent=num_visible is not None and i >= num_visible,
            is_reasoning=i < num_thought,
        )
        for i, (token, logprob) in enumerate(zip(ids, chosen, strict=False))
    ]
