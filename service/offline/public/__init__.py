"""The package `quire`: the Python API, imported on first use.

This is `quire/__init__.py` in a wheel; in a checkout, the editable install maps `quire` to it.
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
    """Import the API on demand: a wheel's command line, whose parent package is `quire` too, starts without it."""
    if name == "__version__":
        return version("quire")
    if name not in __all__:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    from service.offline import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
