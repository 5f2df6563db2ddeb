"""`--speculative-config`: vLLM's JSON, with its method names and keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_SPECULATIVE_TOKENS = 16
MAX_LOOKUP_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    method: str
    num_speculative_tokens: int | None = None
    """None: what the head's config proposes."""
    model: Path | None = None
    """Folder of the head or draft model; None: `eagle3/` in the model's folder."""
    prompt_lookup_min: int = 5
    prompt_lookup_max: int = 5
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1

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
    "eagle3": ("model", "num_speculative_tokens"),
    "draft_model": ("model", "num_speculative_tokens"),
}
_BOUNDS: Mapping[str, tuple[float, float]] = {
    "num_speculative_tokens": (1, MAX_SPECULATIVE_TOKENS),
    "prompt_lookup_min": (1, MAX_LOOKUP_TOKENS),
    "prompt_lookup_max": (1, MAX_LOOKUP_TOKENS),
    "suffix_decoding_max_tree_depth": (3, 1024),
    "suffix_decoding_max_cached_requests": (0, 1 << 20),
    "suffix_decoding_max_spec_factor": (0.0, 16.0),
    "suffix_decoding_min_token_prob": (0.0, 1.0),
}
_FLOATS = ("suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob")
_NOT_BUILT = ("eagle", "medusa", "mlp_speculator", "mtp", "dflash")


def parse_speculative_config(text: str) -> SpeculativeConfig:
    """Raises ValueError with what is allowed."""
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ValueError('a JSON object such as {"method": "ngram", "num_speculative_tokens": 4}')
    method = given.pop("method", "draft_model" if "model" in given else None)
    methods = ", ".join(_KEYS)
    if method in _NOT_BUILT:
        raise ValueError(f"method {method} is not supported ({methods})")
    if not isinstance(method, str) or method not in _KEYS:
        raise ValueError(f"method must be one of {methods}")
    unknown = sorted(given.keys() - set(_KEYS[method]))
    if unknown:
        raise ValueError(f"{method} has no key {unknown[0]} ({', '.join(_KEYS[method])})")
    if "num_speculative_tokens" not in given and method != "eagle3":
        raise ValueError(f"{method} needs num_speculative_tokens")
    if method == "draft_model" and "model" not in given:
        raise ValueError("draft_model needs model")
    values = {key: _checked(key, value) for key, value in given.items()}
    values = _with_both_lengths(values) if method == "ngram" else values
    return SpeculativeConfig(method=method, **values)


def _checked(key: str, value: Any) -> Any:
    if key == "model":
        if not isinstance(value, str) or not value:
            raise ValueError("model must be a folder or org/name")
        return Path(value)
    low, high = _BOUNDS[key]
    is_float = key in _FLOATS
    allowed = (int, float) if is_float else int
    if isinstance(value, bool) or not isinstance(value, allowed) or not low <= value <= high:
        what = "a number" if is_float else "a whole number"
        raise ValueError(f"{key} must be {what} from {low:g} to {high:g}")
    return float(value) if is_float else value


def _with_both_lengths(values: dict[str, Any]) -> dict[str, Any]:
    """Give a missing length the other's value, as vLLM does."""
    given = [values[key] for key in ("prompt_lookup_min", "prompt_lookup_max") if key in values]
    if not given:
        return values
    least, most = given[0], given[-1]
    if least > most:
        raise ValueError(f"prompt_lookup_min {least} exceeds prompt_lookup_max {most}")
    return {**values, "prompt_lookup_min": least, "prompt_lookup_max": most}
