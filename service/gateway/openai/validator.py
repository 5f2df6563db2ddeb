"""OpenAI's request bodies to `Request`, the one validator of both doors: every field works or is refused by name."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from service.errors import RequestError
from service.gateway.generation.refusals import refusal
from service.gateway.generation.request import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    POOLING,
    RESPONSES,
    GenerationRequest,
    Prompt,
    RequestedSampling,
    Source,
)
from service.gateway.openai.bodies import (
    ChatBody,
    CompletionBody,
    EmbeddingBody,
    GenerationBody,
    PoolingBody,
    StreamOptions,
    check_ranges,
    convert,
)
from service.gateway.openai.choices import read_choices
from service.gateway.openai.fields import (
    IDLE_CHAT_FIELDS,
    IDLE_COMPLETION_FIELDS,
    IDLE_EMBEDDING_FIELDS,
    IDLE_POOLING_FIELDS,
    without_idle_fields,
)
from service.gateway.openai.grammar import read_grammar
from service.gateway.openai.messages import MAX_LABEL_CHARS, check_length, conversation, plain_messages
from service.gateway.openai.response_bodies import in_own_words, read_response
from service.gateway.openai.tools import read_tools

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 300
MAX_PROMPTS = 1024
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's own
COLDEST_TEMPERATURE = 1e-4  # below it sampling is greedy in float32 anyway, and logits / temperature would overflow
NARROWEST_TOP_P = 1e-6  # keeps one token, as 0 does at OpenAI
TEMPLATE_OPTIONS = ("enable_thinking",)
"""What a client may hand to the model's chat template: switches, never text."""


def read_request(endpoint: str, body: Mapping[str, Any]) -> GenerationRequest:
    """The request that `body`, sent to `endpoint` (ENDPOINTS and others), makes. Raises RequestError (400)."""
    return _READERS[endpoint](body)


def source_of(request: GenerationRequest, body: Mapping[str, Any]) -> Source:
    """What `read_request` needs to make of `body` the same request again, but for its prompts."""
    prompts = _SHORTEST[request.endpoint](len(request.prompts))
    body = {name: value for name, value in body.items() if value is not None}
    encode = msgspec.json.Encoder(order="deterministic").encode
    digest = hashlib.sha256(encode([request.endpoint, body])).digest()
    return Source(encode({**body, **prompts}), digest)


def _read_completion(fields: Mapping[str, Any]) -> GenerationRequest:
    body = convert(without_idle_fields(fields, IDLE_COMPLETION_FIELDS), CompletionBody)
    only_echoes = body.echo and body.max_tokens == 0 == body.min_tokens
    if only_echoes:
        body = msgspec.structs.replace(body, **_ONE_TOKEN)
    params = _sampling(body, _or(body.max_tokens, DEFAULT_COMPLETION_TOKENS), body.logprobs)
    request = _request(COMPLETIONS, body, _prompts(body.prompt), params)
    if body.echo and body.logprobs is not None:
        if body.prompt_logprobs is not None:
            raise refusal("prompt_logprobs", "cannot go with both 'echo' and 'logprobs', which tell them too")
        request = replace(request, sampling=replace(request.sampling, prompt_logprobs=body.logprobs))
    return replace(request, echo=body.echo, only_echoes=only_echoes, add_special_tokens=body.add_special_tokens)


def _read_chat(fields: Mapping[str, Any]) -> GenerationRequest:
    left = without_idle_fields(fields, IDLE_CHAT_FIELDS)
    if "messages" in left:
        left["messages"] = plain_messages(left["messages"])
    body = convert(left, ChatBody)
    if body.top_logprobs is not None and not body.logprobs:
        raise refusal("top_logprobs", "needs 'logprobs' to be true")
    max_tokens = body.max_tokens
    if body.max_completion_tokens is not None:
        if max_tokens not in (None, body.max_completion_tokens):
            raise refusal("max_tokens", "contradicts 'max_completion_tokens'")
        max_tokens = body.max_completion_tokens
    params = _sampling(body, max_tokens, (body.top_logprobs or 0) if body.logprobs else None)
    for name in body.chat_template_kwargs:
        if name not in TEMPLATE_OPTIONS:
            raise refusal("chat_template_kwargs", f"takes only {', '.join(TEMPLATE_OPTIONS)}")
    if body.continue_final_message and body.add_generation_prompt:
        raise refusal("continue_final_message", "contradicts 'add_generation_prompt'")
    prompt = conversation(
        body.messages,
        not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt,
        body.chat_template_kwargs,
    )
    tools = read_tools(body)
    prompt = replace(
        prompt, continue_final_message=body.continue_final_message, tools=() if tools is None else tools.tools
    )
    return replace(_request(CHAT, body, (prompt,), params), tools=tools)


def _read_response(fields: Mapping[str, Any]) -> GenerationRequest:
    return replace(read_response(fields, _read_chat), endpoint=RESPONSES)


def _read_embedding(fields: Mapping[str, Any]) -> GenerationRequest:
    return _read_pooled(convert(without_idle_fields(fields, IDLE_EMBEDDING_FIELDS), EmbeddingBody))


def _read_pooling(fields: Mapping[str, Any]) -> GenerationRequest:
    request = _read_pooled(body := convert(without_idle_fields(fields, IDLE_POOLING_FIELDS), PoolingBody))
    return replace(request, add_special_tokens=body.add_special_tokens)


def _read_pooled(body: EmbeddingBody) -> GenerationRequest:
    """A completion of one token, which nobody wants, behind the prompt whose vector is."""
    if body.encoding_format not in ("float", "base64"):
        raise refusal("encoding_format", "must be float or base64")
    same = {name: getattr(body, name) for name in ("model", "truncate_prompt_tokens", "timeout", "priority", "user")}
    try:
        request = _read_completion({**same, "prompt": body.input, **_ONE_TOKEN})
    except RequestError as error:
        raise in_own_words(error) from None
    return replace(request, endpoint=EMBEDDINGS, sampling=replace(request.sampling, embeds=True))


_ONE_TOKEN = {"max_tokens": 1, "temperature": 0, "ignore_eos": True}
_READERS: Mapping[str, Callable[[Mapping[str, Any]], GenerationRequest]] = {
    COMPLETIONS: _read_completion,
    CHAT: _read_chat,
    RESPONSES: _read_response,
    EMBEDDINGS: _read_embedding,
    POOLING: _read_pooling,
}
_SHORTEST: Mapping[str, Callable[[int], dict[str, Any]]] = {
    COMPLETIONS: lambda num_prompts: {"prompt": [[0]] * num_prompts},
    CHAT: lambda _: {"messages": [{"role": "user", "content": "."}]},
    RESPONSES: lambda _: {"input": "."},
    EMBEDDINGS: lambda num_prompts: {"input": [[0]] * num_prompts},
}
"""The shortest prompts that a body may have."""


def _prompts(prompt: str | list[str | int | list[int]]) -> tuple[str | tuple[int, ...], ...]:
    """The prompts in OpenAI's four forms: a text, token ids, a list of texts, a list of token ids."""
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        prompt = [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise refusal("prompt", f"has more than {MAX_PROMPTS} entries")
    if not prompt or not all(prompt):
        raise refusal("prompt", "must not be empty")
    if all(isinstance(text, str) for text in prompt):
        return tuple(prompt)
    if not all(isinstance(ids, list) and all(isinstance(token, int) for token in ids) for ids in prompt):
        raise refusal("prompt", "must be texts or token ids, not a mixture")
    return tuple(map(tuple, prompt))


def _sampling(body: GenerationBody, max_tokens: int | None, logprobs: int | None) -> RequestedSampling:
    check_ranges(body)
    if max_tokens is not None and body.min_tokens > max_tokens:
        raise refusal("min_tokens", "must not exceed 'max_tokens'")
    if len(body.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise refusal("stop_token_ids", f"has more than {MAX_STOP_TOKEN_IDS} entries")
    if body.truncate_prompt_tokens == 0:
        raise refusal("truncate_prompt_tokens", "must be at least 1, or -1 for what fits")
    choices, grammar = read_choices(body), read_grammar(body)
    if grammar is not None and choices.beam is not None and body.ignore_eos:
        raise refusal("ignore_eos", f"cannot go with both beams and '{grammar.param}': nothing may follow its end")
    cold = body.temperature is not None and body.temperature < COLDEST_TEMPERATURE
    return RequestedSampling(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        temperature=0.0 if cold else body.temperature,
        top_k=None if body.top_k is None else max(body.top_k, 0),
        top_p=None if body.top_p is None else max(body.top_p, NARROWEST_TOP_P),
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        seed=None if body.seed is None else body.seed % (1 << 64),
        stop_token_ids=tuple(dict.fromkeys(body.stop_token_ids)),
        ignore_eos=body.ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
        logit_bias=_logit_bias(body.logit_bias),
        grammar=grammar,
        n=choices.n,
        best_of=choices.best_of,
        beam=choices.beam,
    )


def _logit_bias(bias: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    if len(bias) > MAX_LOGIT_BIAS:
        raise refusal("logit_bias", f"has more than {MAX_LOGIT_BIAS} entries")
    # Only one spelling of an id: int() would also take "１２", " 1_0 " and "+1", and two spellings of one id.
    if not all(re.fullmatch(r"0|[1-9][0-9]{0,9}", key) for key in bias):
        raise refusal("logit_bias", "has a key that is no token id")
    if not all(math.isfinite(value) and -100 <= value <= 100 for value in bias.values()):
        raise refusal("logit_bias", "has a value outside -100..100")
    return tuple((int(key), float(value)) for key, value in bias.items())


def _request(
    endpoint: str, body: GenerationBody, prompts: tuple[Prompt, ...], params: RequestedSampling
) -> GenerationRequest:
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(dict.fromkeys(body.stop))
    if len(stop) > MAX_STOP_STRINGS:
        raise refusal("stop", f"has more than {MAX_STOP_STRINGS} strings")
    if any(not 0 < len(string) <= MAX_STOP_CHARS for string in stop):
        raise refusal("stop", f"has a string that is empty or longer than {MAX_STOP_CHARS} characters")
    check_length("user", body.user, MAX_LABEL_CHARS)
    check_length("safety_identifier", body.safety_identifier, MAX_LABEL_CHARS)
    include_usage = _includes_usage(body)
    if body.background and body.stream:
        raise refusal("background", "has no stream; take the answer as one from /v1/requests/{id}")
    if body.prompt_logprobs is not None and body.stream:
        raise refusal("prompt_logprobs", "cannot go with 'stream'")
    if body.resumable and body.stream and len(prompts) > 1:
        raise refusal("resumable", "needs a single prompt where 'stream' is true")
    return GenerationRequest(
        endpoint=endpoint,
        model=body.model,
        prompts=prompts,
        sampling=params,
        stop=stop,
        include_stop_str_in_output=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        tokens_as_ids=body.return_tokens_as_token_ids,
        has_prompt_logprobs_field=body.prompt_logprobs is not None,
        stream=body.stream,
        include_usage=include_usage,
        usage_in_chunks=include_usage and bool(body.stream_options.continuous_usage_stats),
        timeout_s=body.timeout,
        priority=body.priority,
        resumable=body.resumable,
        background=body.background,
    )


def _includes_usage(body: GenerationBody) -> bool:
    """Whether a stream ends with its usage. Wanted in every chunk, it is wanted at the end too, as at vLLM, unless the
    client says that it is not: then in none."""
    options = body.stream_options
    if options != StreamOptions() and not body.stream:
        raise refusal("stream_options", "needs 'stream' to be true")
    if options.include_obfuscation:
        raise refusal("stream_options.include_obfuscation", "is not supported here when true")
    return bool(options.continuous_usage_stats if options.include_usage is None else options.include_usage)


def _or(value: int | None, default: int) -> int:
    return default if value is None else value
