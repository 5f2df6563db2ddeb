"""Results in vLLM's shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from service.gateway.core.request import GenerationRequest
from service.gateway.core.response_assembler import ChoiceDelta, TokenLogprob
from service.gateway.openai.logprobs import TokenWords
from service.offline.lora import LoRARequest
from service.offline.sampling_params import RequestOutputKind


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None  # from 1; None: beyond the requested alternatives
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]
"""Log-probabilities at one position, by token id."""


@dataclass
class CompletionOutput:
    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None  # None unless log-probabilities were requested
    logprobs: list[PositionLogprobs] | None
    finish_reason: str | None = None  # "stop", "length"
    stop_reason: int | str | None = None  # the stop string or token id; None: EOS

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[PositionLogprobs | None] | None  # None for the first token
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int | None = None
    lora_request: LoRARequest | None = None


@dataclass
class PoolingOutput:
    data: np.ndarray  # float32[H], a unit vector


@dataclass
class PoolingRequestOutput:
    request_id: str
    outputs: PoolingOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass
class EmbeddingRequestOutput:
    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass
class ScoringOutput:
    score: float  # cosine, -1..1


@dataclass
class ScoringRequestOutput:
    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass
class BeamSearchSequence:
    tokens: list[int]  # prompt included
    logprobs: list[PositionLogprobs]  # of the generated tokens
    cum_logprob: float
    text: str  # prompt included
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class BeamSearchOutput:
    sequences: list[BeamSearchSequence]  # best first


@dataclass
class _Choice:
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    entries: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop: str | int | None = None

    def clear(self) -> None:
        self.texts, self.token_ids, self.entries = [], [], []


class OutputBuilder:
    """Builds one request's outputs from its deltas."""

    def __init__(
        self, request: GenerationRequest, words: TokenWords, kind: RequestOutputKind, *, has_text: bool = True
    ) -> None:
        self._words = words
        self._kind = kind
        self._has_text = has_text
        self._has_logprobs = request.sampling.logprobs is not None
        self._choices = [_Choice() for _ in range(request.sampling.n)]
        self._has_prompt_logprobs = request.sampling.prompt_logprobs is not None
        self._prompt_logprobs: Sequence[TokenLogprob] = ()

    def add(self, deltas: Sequence[ChoiceDelta]) -> None:
        for delta in deltas:
            choice = self._choices[delta.index]
            choice.texts.append(delta.text)
            choice.token_ids += delta.token_ids
            choice.entries += delta.logprobs
            choice.finish_reason, choice.stop = delta.finish_reason, delta.stop
            self._prompt_logprobs = delta.prompt_logprobs or self._prompt_logprobs

    def output(self, request_id: str, prompt: str | None, ids: Sequence[int], *, finished: bool) -> RequestOutput:
        outputs = [self._completion(index, choice) for index, choice in enumerate(self._choices)]
        if self._kind is RequestOutputKind.DELTA:
            for choice in self._choices:
                choice.clear()
        scored: list[PositionLogprobs | None] | None = None
        if self._has_prompt_logprobs:
            scored = [None, *map(self._position, self._prompt_logprobs)]
        return RequestOutput(request_id, prompt, list(ids), scored, outputs, finished)

    def _completion(self, index: int, choice: _Choice) -> CompletionOutput:
        text = "".join(choice.texts) if self._has_text else ""
        choice.texts = [text]
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=list(choice.token_ids),
            cumulative_logprob=sum(entry.logprob for entry in choice.entries) if self._has_logprobs else None,
            logprobs=[self._position(entry) for entry in choice.entries] if self._has_logprobs else None,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop,
        )

    def _position(self, entry: TokenLogprob) -> PositionLogprobs:
        found = {
            token: Logprob(logprob, rank, self._words.text(token)) for rank, (token, logprob) in enumerate(entry.top, 1)
        }
        found.setdefault(entry.token_id, Logprob(entry.logprob, None, self._words.text(entry.token_id)))
        return found
