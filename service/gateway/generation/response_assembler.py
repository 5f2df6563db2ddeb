"""The events of one job to the pieces of its answer: the same events give the same pieces, in whichever gateway."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import Struct
from msgspec.structs import replace

from service.errors import ENDINGS, EndReason
from service.gateway.generation.request import GenerationRequest
from service.gateway.generation.served_model import ServedModel
from service.gateway.generation.text_stream import TextStream, without_end_token
from service.queue.codec import unpack_floats, unpack_ids
from service.queue.messages import Event, Part


@dataclass(frozen=True)
class TokenLogprob:
    """One token of the answer, and the likeliest in its place."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    is_silent: bool = False  # it ended the answer, and is no part of its text


class ChoiceDelta(Struct, frozen=True):
    """A part of one choice. Text may lag behind the tokens whose log-probabilities stand here."""

    index: int  # of the choice, in the whole request
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None  # OpenAI's word, in the last piece of its choice
    num_tokens: int = 0  # generated since the piece before
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of the prompt's tokens but the first; in the choice's first piece


class ResponseAssembler:
    """Feed it the job's events in order, until `reason` is there."""

    def __init__(self, request: GenerationRequest, model: ServedModel, first_index: int = 0) -> None:
        """`first_index` is the index of the job's first choice in the request."""
        self._request = request
        self._is_ranked = request.sampling.is_ranked
        self._model = model
        self._first_index = first_index
        self._silent_ids = _silent_ids(request, model)
        self._branches: dict[int, _Branch] = {}
        self._prompt_logprobs: list[TokenLogprob] = []  # told whole before any branch says a word
        self._started: set[int] = set()  # choices whose first piece is told
        self._chosen: Sequence[int] = ()  # branches to answer with, best first; known at a good end
        self.num_tokens = 0
        self.cached_tokens = 0  # of the prompt, as its first event tells: a stop string may end it here before its last
        self.embedding = b""  # float32[H], of the prompt, where it is wanted; known at the end
        self.reason: EndReason | None = None
        """Why the job ended: said by its last event, or STOP once stop strings have ended every choice."""

    def take(self, event: Event) -> tuple[list[ChoiceDelta], list[int]]:
        """What the event adds to the answer, and the branches that a stop string has just ended."""
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
            self._end(event)
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
        if number not in self._branches:
            request, tokenizer = self._request, self._model.tokenizer
            # A reply is a text of its own; a completion goes on where its prompt stopped, leading space and all.
            detokenizer = tokenizer.detokenizer(request.hides_special_tokens, at_start=request.begins_a_text)
            stop, include_stop = request.stop, request.include_stop_str_in_output
            text = TextStream(detokenizer, stop, include_stop, request.sampling.min_tokens)
            self._branches[number] = _Branch(text, request.sampling.logprobs is not None or self._is_ranked)
        return self._branches[number]

    def _end(self, event: Event) -> None:
        self.reason = event.end
        self.embedding = event.embedding or b""
        word = ENDINGS[event.end].finish_reason
        if word is None:
            return
        self._chosen = self._best(event)
        for number in self._chosen:
            self._branch(number).end(word)

    def _best(self, event: Event) -> Sequence[int]:
        """The worker ranks branches by all that they sampled: what lies behind a stop string is weighed out here."""
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
        """Nothing before the end; then each choice in one piece, and the cost of all branches with them."""
        chosen = self._chosen
        if not chosen:
            return []
        self.num_tokens += sum(b.num_unsent for number, b in self._branches.items() if number not in chosen)
        ranked = (self._branch(number).delta(self._first_index + rank) for rank, number in enumerate(chosen))
        return [delta for delta in ranked if delta is not None]

    def _has_every_end(self) -> bool:
        ended = sum(branch.finish_reason is not None for branch in self._branches.values())
        return ended == self._request.sampling.n


class _Branch:
    """One continuation: what it has said and not yet told."""

    def __init__(self, text: TextStream, wants_logprobs: bool) -> None:
        self._text = text
        self._wants_logprobs = wants_logprobs
        self._unsent = ""
        self._unsent_logprobs: list[TokenLogprob] = []
        self._is_finish_sent = False
        self.num_unsent = 0  # tokens
        self.finish_reason: str | None = None

    def push(self, part: Part, silent_ids: frozenset[int]) -> bool:
        """Whether a stop string has ended the branch, which its worker does not know."""
        ids = unpack_ids(part.tokens)
        spoken = without_end_token(ids, silent_ids)
        decoded = self._text.push(spoken)
        num_tokens = decoded.num_tokens if decoded.stopped else len(ids)
        self._unsent += decoded.text
        self.num_unsent += num_tokens
        if self._wants_logprobs:
            self._unsent_logprobs += _logprobs(part, ids[:num_tokens], num_spoken=len(spoken))
        if decoded.stopped:
            self.finish_reason = _STOP
        elif part.end is not None:
            self.end(ENDINGS[part.end].finish_reason)
            return False
        return decoded.stopped

    def end(self, finish_reason: str | None) -> None:
        """No token follows."""
        if self.finish_reason is None:
            last = self._text.end()
            self._unsent += last.text
            self.finish_reason = _STOP if last.stopped else finish_reason

    @property
    def mean_logprob(self) -> float:
        """A token, of those untold: all of a branch that is ranked."""
        scores = [one.logprob for one in self._unsent_logprobs]
        return sum(scores) / max(1, len(scores))

    def delta(self, index: int) -> ChoiceDelta | None:
        """What there is to tell, if anything."""
        ends_now = self.finish_reason is not None and not self._is_finish_sent
        if not (self._unsent or self._unsent_logprobs or ends_now):
            return None
        logprobs = tuple(self._unsent_logprobs)
        delta = ChoiceDelta(index, self._unsent, logprobs, self.finish_reason if ends_now else None, self.num_unsent)
        self._is_finish_sent = self._is_finish_sent or ends_now
        self._unsent, self._unsent_logprobs, self.num_unsent = "", [], 0
        return delta


_STOP = ENDINGS[EndReason.STOP].finish_reason


def _silent_ids(request: GenerationRequest, model: ServedModel) -> frozenset[int]:
    """Tokens that end the answer and are no part of its text."""
    if request.include_stop_str_in_output:
        return frozenset()
    eos = () if request.sampling.ignore_eos else model.eos_token_ids
    return frozenset((*request.sampling.stop_token_ids, *eos))


def _logprobs(part: Part, ids: Sequence[int], num_spoken: int | None = None) -> list[TokenLogprob]:
    """`num_spoken`: the others of `ids` are no part of the text."""
    if part.logprobs is None:
        return []
    chosen = unpack_floats(part.logprobs.chosen)
    top = list(zip(unpack_ids(part.logprobs.top_ids), unpack_floats(part.logprobs.top), strict=True))
    width = len(top) // len(chosen) if chosen else 0
    return [
        TokenLogprob(
            token, logprob, tuple(top[i * width : (i + 1) * width]), num_spoken is not None and i >= num_spoken
        )
        for i, (token, logprob) in enumerate(zip(ids, chosen, strict=False))
    ]
