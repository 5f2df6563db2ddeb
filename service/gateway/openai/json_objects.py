"""JSON objects shared by several responses: errors, usage, reasoning."""

from __future__ import annotations

from typing import Any

import msgspec

from service.errors import RequestError
from service.gateway.core.response_assembler import Outcome

Json = dict[str, Any]

encode_json = msgspec.json.encode


def error_json(error: RequestError) -> Json:
    return {"error": error_object(error)}


def error_object(error: RequestError) -> Json:
    return {"message": error.message, "type": error.type, "param": error.param, "code": error.code}


def usage_json(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None) -> Json:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def usage_of(outcome: Outcome) -> Json:
    usage = usage_json(outcome.prompt_tokens, outcome.completion_tokens, outcome.cached_tokens)
    details = prediction_json(outcome)
    if outcome.reasoning_tokens is not None:
        details = {"reasoning_tokens": outcome.reasoning_tokens, **details}
    return {**usage, "completion_tokens_details": details} if details else usage


def prediction_json(outcome: Outcome) -> Json:
    """Return the counts of draft tokens, if any were verified."""
    if not outcome.accepted_drafts + outcome.rejected_drafts:
        return {}
    return {
        "accepted_prediction_tokens": outcome.accepted_drafts,
        "rejected_prediction_tokens": outcome.rejected_drafts,
    }


def reasoning_json(text: str) -> Json:
    """Return a message's reasoning under vLLM's and DeepSeek's names."""
    return {"reasoning": text, "reasoning_content": text}
