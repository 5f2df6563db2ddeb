"""vLLM's parameter classes. Each value is validated like the HTTP field of its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any, Self, TypeVar

from service.errors import RequestError
from service.gateway.core.request import COMPLETIONS, EMBEDDINGS, GenerationRequest
from service.gateway.openai.request_reader import read_request
from service.offline.vllm_names import named_fields

ANY_PROMPT = {"prompt": [0]}
UNBOUNDED = 1 << 31
RECOMMENDED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
RANDOM_SEED = -1
"""vLLM's spelling of None."""


class RequestOutputKind(Enum):
    """Contents of each output of `AsyncLLM.generate`."""

    CUMULATIVE = 0  # everything so far
    DELTA = 1  # what is new
    FINAL_ONLY = 2  # everything, once


@named_fields
@dataclass(kw_only=True)
class StructuredOutputsParams:
    """The output's required format: one of the first five fields."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_fallback: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None  # not supported

    def fields(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value not in (None, False)}


GuidedDecodingParams = StructuredOutputsParams
"""vLLM's name before 0.11."""


@named_fields
@dataclass
class SamplingParams:
    """vLLM's fields in order, and `best_of`. Raises ValueError that names the invalid value."""

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0, -1: all tokens
    min_p: float = 0.0
    seed: int | None = None  # None: derived from the LLM's seed
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: up to the model's context length
    min_tokens: int = 0
    logprobs: int | None = None  # alternatives per token, 0..20
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: StructuredOutputsParams | None = None
    guided_decoding: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    logits_processors: list[Any] | None = None  # not supported
    extra_args: dict[str, Any] | None = None  # not supported
    best_of: int | None = None

    def __post_init__(self) -> None:
        self.request()

    @classmethod
    def from_optional(cls, **values: Any) -> Self:
        """Return params in which None means the default. Raises ValueError."""
        return cls(**{name: value for name, value in values.items() if value is not None})

    def clone(self) -> Self:
        return deepcopy(self)

    def request(self) -> GenerationRequest:
        """Return a completion request with a placeholder prompt. Raises ValueError."""
        for name in ("logits_processors", "extra_args"):
            if getattr(self, name):
                raise ValueError(f"'{name}' is not supported")
        if self.structured_outputs is not None and self.guided_decoding is not None:
            raise ValueError("'guided_decoding' cannot go with 'structured_outputs'")
        if not self.detokenize and self.stop:
            raise ValueError("'stop' needs 'detokenize'")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise ValueError("'output_kind' must be a RequestOutputKind")
        request = checked_request(COMPLETIONS, {**ANY_PROMPT, **self._fields()})
        if self.max_tokens is None:
            request = replace(request, sampling=replace(request.sampling, max_tokens=None))
        return replace(request, has_token_ids=True, parse_special=True)

    def _fields(self) -> dict[str, Any]:
        same = (
            "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k",
            "min_p", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "logprobs", "prompt_logprobs",
            "skip_special_tokens", "spaces_between_special_tokens", "truncate_prompt_tokens",
            "include_stop_str_in_output", "allowed_token_ids", "bad_words", "best_of",
        )  # fmt: skip
        form, bias = self.structured_outputs or self.guided_decoding, self.logit_bias
        return {name: getattr(self, name) for name in same} | {
            "seed": None if self.seed == RANDOM_SEED else self.seed,
            "max_tokens": UNBOUNDED if self.max_tokens is None else self.max_tokens,
            "logit_bias": None if bias is None else {str(token): each for token, each in bias.items()},
            "structured_outputs": None if form is None else form.fields(),
        }


@named_fields
@dataclass
class BeamSearchParams:
    """vLLM's beam-search parameters. Raises ValueError that names the invalid value."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0  # only 0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        self.request()

    def request(self) -> GenerationRequest:
        """Return a request like `SamplingParams.request`. Raises ValueError."""
        fields = {**ANY_PROMPT, **asdict(self), "n": self.beam_width, "use_beam_search": True, "logprobs": 0}
        return replace(checked_request(COMPLETIONS, fields), has_token_ids=True, parse_special=True)


@named_fields
@dataclass
class PoolingParams:
    """vLLM's pooling parameters. Raises ValueError that names the invalid value."""

    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        self.request()

    def request(self) -> GenerationRequest:
        """Return a request like `SamplingParams.request`. Raises ValueError."""
        return replace(checked_request(EMBEDDINGS, {"input": [0], **asdict(self)}), parse_special=True)


AnyParams = SamplingParams | BeamSearchParams | PoolingParams
Params = TypeVar("Params", bound=AnyParams)


def each_params(given: Params | Sequence[Params], kind: type[Params], name: str, num_prompts: int) -> Sequence[Params]:
    """Return one `kind` per prompt. `name`: the argument's name. Raises ValueError."""
    if isinstance(given, kind):
        return [given] * num_prompts
    if not isinstance(given, Sequence) or not all(isinstance(each, kind) for each in given):
        raise ValueError(f"'{name}' must be a {kind.__name__}, or a list of them")
    if len(given) != num_prompts:
        raise ValueError(f"'{name}': {len(given)} for {num_prompts} prompts (one, or one per prompt)")
    return given


def checked_request(endpoint: str, fields: dict[str, Any]) -> GenerationRequest:
    """Return the request for HTTP fields. Raises ValueError."""
    try:
        return read_request(endpoint, fields)
    except RequestError as error:
        raise ValueError(error.message) from None


def default_sampling_params(defaults: Mapping[str, float]) -> SamplingParams:
    """Return vLLM's defaults, overridden by the values recommended in a model's folder."""
    known: dict[str, Any] = {name: value for name, value in defaults.items() if name in RECOMMENDED}
    if "top_k" in known:
        known["top_k"] = int(known["top_k"])
    return SamplingParams(**known)
