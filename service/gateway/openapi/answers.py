"""Response schemas for `/openapi.json`; tests check real responses against them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from service.gateway.openapi.message_answers import AnthropicMessage, AnthropicRefusal, TokenCount
from service.gateway.openapi.response_answers import InputTokens, Response, ResponseDeleted, ResponseItems, Shape
from service.queue.records import BatchStatus


class PromptTokensDetails(Shape):
    cached_tokens: int


class CompletionTokensDetails(Shape):
    reasoning_tokens: int | msgspec.UnsetType = msgspec.UNSET
    accepted_prediction_tokens: int | msgspec.UnsetType = msgspec.UNSET
    rejected_prediction_tokens: int | msgspec.UnsetType = msgspec.UNSET


class TokenUsage(Shape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET


class CompletionLogprobs(Shape):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class PromptLogprob(Shape):
    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None] | None


class CompletionChoice(Shape):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: str | int | None
    prompt_logprobs: PromptLogprobs
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class Completion(Shape):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: TokenUsage


class TopLogprob(Shape):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Shape):
    content: list[ChatTokenLogprob]
    refusal: None


class CalledFunction(Shape):
    name: str
    arguments: str


class ToolCall(Shape):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Shape):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(Shape):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    stop_reason: str | int | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(Shape):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: TokenUsage
    prompt_logprobs: PromptLogprobs
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class Embedding(Shape):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Shape):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Shape):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class PoolingVector(Shape):
    index: int
    object: Literal["pooling"]
    data: list[float] | str


class PoolingUsage(EmbeddingUsage):
    completion_tokens: Literal[0]
    prompt_tokens_details: None


class PoolingList(Shape):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PoolingVector]
    usage: PoolingUsage


class ModelPermission(Shape):
    id: str
    object: Literal["model_permission"]
    created: int
    allow_create_engine: bool
    allow_sampling: bool
    allow_logprobs: bool
    allow_search_indices: bool
    allow_view: bool
    allow_fine_tuning: bool
    organization: str
    group: str | None
    is_blocking: bool


class Model(Shape):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int
    permission: list[ModelPermission]


class ModelList(Shape):
    object: Literal["list"]
    data: list[Model]


class Tokens(Shape):
    count: int
    tokens: list[int]
    token_strs: list[str] | None
    max_model_len: int


class Detokenized(Shape):
    prompt: str


class Score(Shape):
    index: int
    object: Literal["score"]
    score: float


class ScoreList(Shape):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage


class RankedText(Shape):
    text: str


class RankedDocument(Shape):
    index: int
    relevance_score: float
    document: RankedText | msgspec.UnsetType = msgspec.UNSET


class Ranking(Shape):
    id: str
    created: int
    model: str
    results: list[RankedDocument]
    usage: EmbeddingUsage


class File(Shape):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]


class FileList(Shape):
    object: Literal["list"]
    data: list[File]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(Shape):
    id: str
    object: Literal["file"]
    deleted: bool


class BatchErrorEntry(Shape):
    code: str
    message: str
    line: int | None
    param: None


class BatchErrors(Shape):
    object: Literal["list"]
    data: list[BatchErrorEntry]


class BatchCounts(Shape):
    total: int
    completed: int
    failed: int


class Batch(Shape):
    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: Literal["24h"]
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchCounts
    metadata: dict[str, str] | None


class BatchList(Shape):
    object: Literal["list"]
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Status(Shape):
    status: str


class Version(Shape):
    version: str


class ServerInfo(Version):
    model: str
    max_model_len: int
    vocab_size: int
    tool_call_parser: str | None
    reasoning_parser: str | None
    settings: dict[str, Any]


class Readiness(Shape):
    status: Literal["ok", "not ready"]
    missing: list[str]
    num_ready_workers: int


class ErrorObject(Shape):
    message: str
    type: str
    param: str | None
    code: str | None


class Refusal(Shape):
    error: ErrorObject


class RequestState(Shape):
    id: str
    object: Literal["request"]
    endpoint: str
    created: int
    background: bool
    status: Literal["queued", "in_progress", "cancelling", "completed", "failed", "cancelled"]
    queue_position: int | None
    error: ErrorObject | None
    response: dict[str, Any] | None


ANSWERS: tuple[Any, ...] = (
    *(Completion, ChatCompletion, RequestState, ModelList, Model, Tokens, Detokenized),
    *(Response, InputTokens, ResponseDeleted, ResponseItems, EmbeddingList, PoolingList, ScoreList, Ranking),
    *(File, FileList, FileDeleted, Batch, BatchList),
    *(Status, Readiness, Version, ServerInfo, Refusal, AnthropicMessage, AnthropicRefusal, TokenCount),
)
