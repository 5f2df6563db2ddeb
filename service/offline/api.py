"""Names of the Python API."""

from __future__ import annotations

from service.offline.async_llm import AsyncLLM
from service.offline.llm import LLM
from service.offline.lora import LoRARequest
from service.offline.outputs import CompletionOutput, Logprob, RequestOutput
from service.offline.prompts import TextPrompt, TokensPrompt
from service.offline.sampling_params import (
    BeamSearchParams,
    GuidedDecodingParams,
    PoolingParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)

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
