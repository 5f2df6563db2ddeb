"""Traces: lengths and arrivals of a workload's requests."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from service.errors import StartupError

MOST_TOKENS = 1 << 24


@dataclass(frozen=True)
class TracedRequest:
    """A request of a trace. `arrival` is in mean gaps since the start; divided by a rate it is seconds."""

    num_prompt_tokens: int
    num_output_tokens: int
    arrival: float


def read_trace(path: Path) -> list[TracedRequest]:
    """Read JSON {"requests": [{"prompt_tokens", "output_tokens", "arrival"}, ...]}; a missing arrival is 0.

    Raises StartupError with one line that names the file and request.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["requests"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StartupError(f"--trace: {path}: not a trace: {error}") from None
    if not isinstance(entries, list) or not entries:
        raise StartupError(f"--trace: {path} has no requests")
    requests = [_request(entry, f"--trace: {path}: request {number}") for number, entry in enumerate(entries)]
    if any(later.arrival < earlier.arrival for earlier, later in pairwise(requests)):
        raise StartupError(f"--trace: {path}: arrivals go back in time")
    return requests


def scaled(requests: Sequence[TracedRequest], mean_prompt: float, mean_output: float) -> list[TracedRequest]:
    """Scale prompts and outputs to these means, up to rounding. The minimum is one token."""
    by_prompt = mean_prompt / fmean(request.num_prompt_tokens for request in requests)
    by_output = mean_output / fmean(request.num_output_tokens for request in requests)
    return [
        TracedRequest(
            max(1, round(by_prompt * request.num_prompt_tokens)),
            max(1, round(by_output * request.num_output_tokens)),
            request.arrival,
        )
        for request in requests
    ]


def _request(entry: Any, where: str) -> TracedRequest:
    if not isinstance(entry, dict):
        raise StartupError(f"{where}: not an object")
    prompt, output = (entry.get(field, 0) for field in ("prompt_tokens", "output_tokens"))
    if not all(type(length) is int and 1 <= length <= MOST_TOKENS for length in (prompt, output)):
        raise StartupError(f"{where}: prompt_tokens and output_tokens are whole numbers in 1..{MOST_TOKENS}")
    arrival = entry.get("arrival", 0.0)
    if type(arrival) not in (int, float) or not (math.isfinite(arrival) and arrival >= 0):
        raise StartupError(f"{where}: arrival is a number, 0 or more")
    return TracedRequest(prompt, output, float(arrival))
