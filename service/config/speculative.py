"""`--speculative-config`: vLLM's JSON, with its method names and keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_SPECULATIVE_TOKENS = 16
MAX_LOOKUP_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    method: str
    num_speculative_tokens: int | None = None
    """None: the value in the head's config."""
    model: Path | None = None
    """Folder of the head or draft model; None: `eagle3/` in the model's folder."""
    revision: str | None = None
    """Revision, if `model` is a repository name."""
    prompt_lookup_min: int = 5
    prompt_lookup_max: int = 5
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    ignored: tuple[str, ...] = field(default=(), compare=False)
    """Given keys that have no effect here and do not change outputs."""

    def __str__(self) -> str:
        given = {key: getattr(self, key) for key in ("method", *_KEYS[self.method])}
        return json.dumps({key: value for key, value in given.items() if value is not None}, default=str)


_KEYS: Mapping[str, tuple[str, ...]] = {
    "ngram": ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"),
    "suffix": (
        "num_speculative_tokens",
        "suffix_decoding_max_tree_depth",
        "suffix_decoding_max_cached_requests",
        "suffix_decoding_max_spec_factor",
        "suffix_decoding_min_token_prob",
    ),
    "eagle3": ("model", "revision", "num_speculative_tokens"),
    "draft_model": ("model", "revision", "num_speculative_tokens"),
}
_BOUNDS: Mapping[str, tuple[int, int]] = {
    "num_speculative_tokens": (1, MAX_SPECULATIVE_TOKENS),
    "prompt_lookup_min": (1, MAX_LOOKUP_TOKENS),
    "prompt_lookup_max": (1, MAX_LOOKUP_TOKENS),
    "suffix_decoding_max_tree_depth": (3, 1024),
    "suffix_decoding_max_cached_requests": (0, 1 << 20),
    "suffix_decoding_max_spec_factor": (0, 16),
    "suffix_decoding_min_token_prob": (0, 1),
}
_FLOATS = ("suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob")
_ALIASES = {"ngram_gpu": "ngram"}
_NGRAM_MODELS = ("ngram", "[ngram]")
_IGNORED = (
    "disable_by_batch_size", "num_speculative_tokens_per_batch_size", "enable_adaptive_verification",
    "disable_padded_drafter_batch", "disable_eagle_block_drop", "use_local_argmax_reduction", "draft_sample_method",
    "attention_backend", "moe_backend", "enforce_eager", "code_revision", "draft_load_config",
)  # fmt: skip
"""Keys that do not change outputs: the number of drafts is chosen at each step."""
_FIXED: Mapping[str, Any] = {
    "draft_tensor_parallel_size": 1,
    "use_heterogeneous_vocab": False,
    "parallel_drafting": False,
    "kv_cache_dtype": "auto",
    "rejection_sample_method": "standard",
}
_REFUSED = {
    "tensor_parallel_size": "use draft_tensor_parallel_size",
    "quantization": "leave it out: the folder names its format",
    "max_model_len": "leave it out: drafts go as far as the model",
}


def parse_speculative_config(text: str) -> SpeculativeConfig:
    """Raises ValueError with what is allowed."""
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    except (ValueError, RecursionError):
        raise ValueError("not JSON: a number of too many digits, or too many levels") from None
    if not isinstance(given, dict):
        raise ValueError('a JSON object such as {"method": "ngram", "num_speculative_tokens": 4}')
    given = {key: value for key, value in given.items() if value is not None}
    method = _method(given)
    ignored = _without_effect(given)
    unknown = sorted(given.keys() - set(_KEYS[method]))
    if unknown:
        raise ValueError(f"{method} has no key {unknown[0]} ({', '.join(_KEYS[method])})")
    if "num_speculative_tokens" not in given and method == "ngram":
        raise ValueError("ngram needs num_speculative_tokens")
    if method == "draft_model" and "model" not in given:
        raise ValueError("draft_model needs model")
    if method == "suffix":
        given.setdefault("num_speculative_tokens", MAX_SPECULATIVE_TOKENS)
    values = {key: _checked(key, value) for key, value in given.items()}
    if "revision" in given and "model" not in given:
        raise ValueError("revision needs model")
    values = _with_both_lengths(values) if method == "ngram" else values
    return SpeculativeConfig(method=method, ignored=ignored, **values)


def _method(given: dict[str, Any]) -> str:
    """Take the method from `given`. For a model without one, it is determined when its config is read."""
    method, methods = given.pop("method", None), ", ".join(_KEYS)
    if method is None and "model" in given:
        method = "ngram" if given["model"] in _NGRAM_MODELS else "draft_model"
    if not isinstance(method, str):
        raise ValueError(f"method must be one of {methods}")
    method = _ALIASES.get(method, method)
    if method not in _KEYS:
        raise ValueError(f"method {method} is not supported ({methods})")
    if method == "ngram" and given.get("model") in _NGRAM_MODELS:
        del given["model"]
    return method


def _without_effect(given: dict[str, Any]) -> tuple[str, ...]:
    """Remove keys that match fixed values or have no effect from `given`; return the latter."""
    for key, reason in _REFUSED.items():
        if key in given:
            raise ValueError(f"{key} is not supported ({reason})")
    for key, value in _FIXED.items():
        if (wanted := given.pop(key, value)) != value or type(wanted) is not type(value):
            raise ValueError(f"{key} {json.dumps(wanted)} is not supported ({json.dumps(value)})")
    ignored = tuple(key for key in _IGNORED if key in given)
    for key in ignored:
        del given[key]
    return ignored


def _checked(key: str, value: Any) -> Any:
    if key in ("model", "revision"):
        if not isinstance(value, str) or not value:
            raise ValueError(f"{key} must be {'a folder or org/name' if key == 'model' else 'a branch, tag or commit'}")
        return Path(value) if key == "model" else value
    low, high = _BOUNDS[key]
    is_float = key in _FLOATS
    allowed = (int, float) if is_float else int
    if isinstance(value, bool) or not isinstance(value, allowed) or not low <= value <= high:
        what = "a number" if is_float else "a whole number"
        raise ValueError(f"{key} must be {what} from {low} to {high}")
    return float(value) if is_float else value


def _with_both_lengths(values: dict[str, Any]) -> dict[str, Any]:
    """Default a missing length to the other one, as vLLM does."""
    given = [values[key] for key in ("prompt_lookup_min", "prompt_lookup_max") if key in values]
    if not given:
        return values
    least, most = given[0], given[-1]
    if least > most:
        raise ValueError(f"prompt_lookup_min {least} exceeds prompt_lookup_max {most}")
    return {**values, "prompt_lookup_min": least, "prompt_lookup_max": most}
