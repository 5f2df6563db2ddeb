"""The package `quire`: the Python API, imported when it is first used.

A wheel's `quire/__init__.py`, and in a checkout what the editable install maps `quire` to.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "GuidedDecodingParams",
    "LoRARequest",
    "Logprob",
    "PoolingParams",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
]


def __getattr__(name: str) -> Any:
    """Import the API: `quire` is also the parent package of a wheel's command line, which starts without it."""
    if name == "__version__":
        return version("quire")
    if name not in __all__:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    from service.offline import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
