"""Names of vLLM's Python API that have no counterpart here: values without effect, and reasons for refusals."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import wraps
from typing import Any, NoReturn, TypeVar, cast


class ArgumentError(TypeError, ValueError):
    """A call with invalid argument names. A TypeError like Python's, a ValueError like other refusals here."""


@dataclass(frozen=True)
class Keyword:
    reason: str  # why it is refused, and the alternative
    accepted: tuple[object, ...] = ()  # values without effect, like None


_TEXT = "only text models are served"
_WEIGHTS = "weights are read when the model is made: make another LLM"
_BEAMS = "use LLM.beam_search"
_UNIT = "vectors have length 1 and the model's size"
_NO_HEAD = "models with a classification or reward head are not served (LLM.score compares embeddings)"
_MEMORY = "the engine keeps its memory until shutdown()"
_NO_WORKERS = "the engine is a thread of this process, without vLLM's workers"
_PROFILER = "start the program under a profiler such as nsys"
_LORA = "pass `lora_request`: adapters are loaded with the first request that uses them"
_ENGINE = "no part of vLLM's engine is here (generate, chat, encode; AsyncLLM streams)"

KEYWORDS: dict[str, Keyword] = {
    "prompt_token_ids": Keyword('pass `prompts` as token ids, or as {"prompt_token_ids": ids}'),
    "tokenization_kwargs": Keyword("truncate by truncate_prompt_tokens of the params", ({},)),
    "truncate_prompt_tokens": Keyword("it is a field of SamplingParams and PoolingParams"),
    "pooling_task": Keyword("one pooled vector per prompt is returned", ("embed",)),
    "task": Keyword("one pooled vector per prompt is returned", ("embed",)),
    "chat_template_content_format": Keyword("the template gets what it reads", ("auto",)),
    "concurrency_limit": Keyword("the engine limits what runs at once (LLM(max_num_seqs=N))"),
    "mm_processor_kwargs": Keyword(_TEXT, ({},)),
    "guided_options_request": Keyword("use SamplingParams(structured_outputs=...)"),
    "trace_headers": Keyword("requests are not traced", ({},)),
    "data_parallel_rank": Keyword("an engine is one process"),
    "reasoning_ended": Keyword("reasoning is part of the text"),
    "thinking_token_budget": Keyword("reasoning is part of the text"),
    "use_beam_search": Keyword(_BEAMS, (False,)),
    "length_penalty": Keyword(_BEAMS, (1.0,)),
    "early_stopping": Keyword(_BEAMS, (False,)),
    "flat_logprobs": Keyword("log-probabilities are maps by token", (False,)),
    "skip_clone": Keyword("params are never copied", (False, True)),
    "skip_reading_prefix_cache": Keyword("give the prompt a cache_salt of its own", (False,)),
    "repetition_detection": Keyword("use repetition_penalty or frequency_penalty"),
    "dimensions": Keyword(_UNIT),
    "normalize": Keyword(_UNIT, (True,)),
    "use_activation": Keyword(_UNIT, (True,)),
    "activation": Keyword(_UNIT, (True,)),
    "softmax": Keyword(_UNIT, (True,)),
    "step_tag_id": Keyword(_NO_HEAD),
    "returned_token_ids": Keyword(_NO_HEAD),
    "extra_kwargs": Keyword("no model has more parameters", ({},)),
}

ATTRIBUTES: dict[str, str] = {
    **dict.fromkeys(("classify", "reward"), _NO_HEAD),
    **dict.fromkeys(("sleep", "wake_up", "is_sleeping"), _MEMORY),
    **dict.fromkeys(("llm_engine", "engine_core", "model_config", "vllm_config", "request_counter"), _ENGINE),
    **dict.fromkeys(("enqueue", "wait_for_completion", "from_engine_args", "from_vllm_config"), _ENGINE),
    **dict.fromkeys(("pause_generation", "resume_generation", "wait_for_requests_to_drain"), _ENGINE),
    **dict.fromkeys(("collective_rpc", "apply_model", "get_world_size"), _NO_WORKERS),
    **dict.fromkeys(("start_profile", "stop_profile"), _PROFILER),
    **dict.fromkeys(("update_weights", "init_weight_transfer_engine"), _WEIGHTS),
    **dict.fromkeys(("add_lora", "remove_lora", "list_loras", "pin_lora"), _LORA),
    "reset_mm_cache": _TEXT,
    "set_tokenizer": "the tokenizer is the model folder's",
    "get_metrics": "metrics are of `quire serve` (/metrics)",
    "supported_tasks": "there are two, generate and embed",
    "preprocess_chat": "chat() renders the template; outputs have prompt_token_ids",
    "is_running": "use check_health()",
    "is_stopped": "use check_health()",
    "errored": "use check_health()",
    "dead_error": "use check_health()",
}

Function = TypeVar("Function", bound=Callable[..., Any])
Class = TypeVar("Class")


class _VllmClassNames(type):
    def __getattr__(cls, name: str) -> NoReturn:
        raise _lacks(cls, name, cls)


class VllmNames(metaclass=_VllmClassNames):
    """Base class that raises with the reason for each missing vLLM attribute."""

    def __getattr__(self, name: str) -> NoReturn:
        raise _lacks(type(self), name, self)


def _lacks(cls: type, name: str, owner: object) -> AttributeError:
    reason = f"not supported: {ATTRIBUTES[name]}" if name in ATTRIBUTES else "unknown name"
    return AttributeError(f"{cls.__name__}.{name}: {reason}", name=name, obj=owner)


def named(function: Function) -> Function:
    """Decorate a function: invalid argument names raise ArgumentError, which lists them."""
    return cast(Function, _named(function, function.__qualname__))


def named_fields(cls: type[Class]) -> type[Class]:
    """Apply `named` to a dataclass's constructor."""
    type.__setattr__(cls, "__init__", _named(vars(cls)["__init__"], cls.__name__))
    return cls


def _named(function: Callable[..., Any], subject: str) -> Callable[..., Any]:
    signature = inspect.signature(function)
    names = list(signature.parameters)
    by_position = [each.name for each in signature.parameters.values() if each.kind is not each.KEYWORD_ONLY]

    @wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        if not keywords.keys() <= signature.parameters.keys():
            keywords = _known(subject, names, keywords)
        try:
            signature.bind(*args, **keywords)
        except TypeError as error:
            allowed = ", ".join(by_position[1:]) or "none"
            raise ArgumentError(f"{subject}: {error} (by position: {allowed})") from None
        return function(*args, **keywords)

    return call


def _known(subject: str, names: Collection[str], given: Mapping[str, object]) -> dict[str, object]:
    known: dict[str, object] = {}
    for name, value in given.items():
        keyword = KEYWORDS.get(name)
        if name in names:
            known[name] = value
        elif keyword is None:
            nearest = "".join(f" (did you mean {alike}?)" for alike in get_close_matches(name, names, n=1))
            raise ArgumentError(f"{subject}: unknown argument '{name}'{nearest}")
        elif value is not None and value not in keyword.accepted:
            raise ArgumentError(f"{subject}: '{name}' is not supported: {keyword.reason}")
    return known
