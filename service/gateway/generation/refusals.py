"""The refusals of a request that several rooms speak: a field with a bad value, a grammar, a length."""

from __future__ import annotations

from model.errors import GrammarError
from service.errors import RequestError


def refusal(param: str, why: str) -> RequestError:
    """The 400 of a known field with a bad value."""
    return RequestError(400, f"'{param}' {why}.", param=param)


def missing(param: str) -> RequestError:
    """The 400 of a field that has to be there."""
    return RequestError(400, f"'{param}' is required.", param=param, code="missing_required_parameter")


def grammar_refusal(error: GrammarError, param: str) -> RequestError:
    """The 400 of a grammar that cannot be had."""
    return RequestError(400, f"'{param}': {error}", param=param, code="invalid_grammar")


def too_long(max_model_len: int, param: str) -> RequestError:
    """The 400 of a prompt that, with what it asks for, is longer than the model's context."""
    message = f"This model's context is {max_model_len} tokens; the prompt and the tokens asked for exceed it."
    return RequestError(400, message, param=param, code="context_length_exceeded")


def too_costly(max_tokens: int) -> RequestError:
    """The 400 of a request that costs more tokens than one may."""
    message = f"The prompts and the tokens asked for, over all choices, exceed {max_tokens} tokens."
    return RequestError(400, message, param="max_tokens", code="request_too_large")
