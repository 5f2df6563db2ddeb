"""Reads request bodies into `GenerationRequest`s. Every field works or is refused."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import msgspec

from model.sampling_params import BeamSearch
from service.errors import RequestError
from service.gateway.core.accepted_request import is_client_id
from service.gateway.core.refusals import refusal
from service.gateway.core.request import (
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
from service.gateway.core.text_threads import TextThreads
from service.gateway.openai.grammar import read_grammar
from service.gateway.openai.messages import (
    MAX_LABEL_CHARS,
    check_length,
    conversation,
    plain_messages,
    read_tools,
    template_options,
)
from service.gateway.openai.request_bodies import (
    IDLE_CHAT_FIELDS,
    IDLE_COMPLETION_FIELDS,
    IDLE_EMBEDDING_FIELDS,
    IDLE_POOLING_FIELDS,
    MAX_BEAM_WIDTH,
    ChatBody,
    CompletionBody,
    EmbeddingBody,
    GenerationBody,
    PoolingBody,
    StreamOptions,
    check_metadata,
    check_part_types,
    check_ranges,
    convert,
    without_idle_fields,
)
from service.gateway.openai.responses.request_reader import read_response, with_own_field_names
from service.gateway.openai.strict_json import decode_object

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 300
MAX_ALLOWED_TOKEN_IDS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 64
MAX_PROMPTS = 1024
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
COLDEST_TEMPERATURE = 1e-4  # below it, float32 sampling is greedy and logits / temperature overflows
NARROWEST_TOP_P = 1e-6  # keeps one token, as 0 does at OpenAI
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


async def parse_body(threads: TextThreads, endpoint: str, body: bytes, tenant: str) -> GenerationRequest:
    """Parse a JSON body, off the event loop if it is large. Raises RequestError (400)."""
    return await threads.run_sized(len(body), tenant, _read_body, endpoint, body)


def _read_body(endpoint: str, body: bytes) -> GenerationRequest:
    return read_fields(endpoint, decode_object(body))


def read_fields(endpoint: str, fields: Mapping[str, Any]) -> GenerationRequest:
    """Return the request with its `source`. Raises RequestError (400)."""
    request = read_request(endpoint, fields)
    return replace(request, source=source_of(request, fields))


def read_request(endpoint: str, fields: Mapping[str, Any]) -> GenerationRequest:
    """Read a body for `endpoint`: one of BATCH_ENDPOINTS, or POOLING. Raises RequestError (400)."""
    return _READERS[endpoint](fields)


def source_of(request: GenerationRequest, fields: Mapping[str, Any]) -> Source:
    return make_source(request.endpoint, fields, _SHORTEST[request.endpoint](len(request.prompts)))


def make_source(endpoint: str, fields: Mapping[str, Any], prompts: Mapping[str, Any]) -> Source:
    """Build a source. `prompts`: minimum-length valid values of the prompt fields."""
    fields = {name: value for name, value in fields.items() if value is not None}
    encode = msgspec.json.Encoder(order="deterministic").encode
    digest = hashlib.sha256(encode([endpoint, fields])).digest()
    return Source(encode({**fields, **prompts}), digest)


def _read_completion(fields: Mapping[str, Any]) -> GenerationRequest:
    body = convert(without_idle_fields(fields, IDLE_COMPLETION_FIELDS), CompletionBody)
    only_echoes = body.echo and body.max_tokens == 0 == body.min_tokens
    if only_echoes:
        body = msgspec.structs.replace(body, **_ONE_TOKEN)
    params = _sampling(body, _or(body.max_tokens, DEFAULT_COMPLETION_TOKENS), body.logprobs)
    request = _request(COMPLETIONS, body, _prompts(body.prompt), params)
    if body.echo and body.logprobs is not None:
        if body.prompt_logprobs is not None:
            raise refusal("prompt_logprobs", "cannot go with both 'echo' and 'logprobs', which return them too")
        request = replace(request, sampling=replace(request.sampling, prompt_logprobs=body.logprobs))
    return replace(
        request,
        echo=body.echo,
        only_echoes=only_echoes,
        add_special_tokens=body.add_special_tokens,
        parse_special=body.parse_special,
    )


def _read_chat(fields: Mapping[str, Any]) -> GenerationRequest:
    left = without_idle_fields(fields, IDLE_CHAT_FIELDS)
    if "messages" in left:
        left["messages"] = plain_messages(left["messages"])
    check_part_types(left.get("tools"), ("function",), "tools")
    body = convert(left, ChatBody)
    if body.top_logprobs and not body.logprobs:
        raise refusal("top_logprobs", "needs 'logprobs' to be true")
    max_tokens = body.max_tokens
    if body.max_completion_tokens is not None:
        if max_tokens not in (None, body.max_completion_tokens):
            raise refusal("max_tokens", "contradicts 'max_completion_tokens'")
        max_tokens = body.max_completion_tokens
    params = _sampling(body, max_tokens, (body.top_logprobs or 0) if body.logprobs else None)
    if body.reasoning_effort not in (None, *EFFORTS):
        raise refusal("reasoning_effort", f"must be one of {', '.join(EFFORTS)}")
    if body.verbosity not in (None, "low", "medium", "high"):
        raise refusal("verbosity", "must be one of low, medium, high")
    if body.continue_final_message and body.add_generation_prompt:
        raise refusal("continue_final_message", "contradicts 'add_generation_prompt'")
    prompt = conversation(
        body.messages,
        not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt,
        template_options(body.chat_template_kwargs),
    )
    check_metadata(body.metadata)
    tools = read_tools(body)
    prompt = replace(
        prompt,
        continue_final_message=body.continue_final_message,
        tools=() if tools is None else tools.tools,
        hints={name: value for name in ("reasoning_effort", "verbosity") if (value := getattr(body, name)) is not None},
    )
    params = replace(params, reasoning_budget=body.thinking_token_budget)
    request = _request(CHAT, body, (prompt,), params)
    return replace(request, tools=tools, include_reasoning=body.include_reasoning)


def _read_response(fields: Mapping[str, Any]) -> GenerationRequest:
    return replace(read_response(fields, _read_chat), endpoint=RESPONSES)


def _read_embedding(fields: Mapping[str, Any]) -> GenerationRequest:
    return _read_pooled(convert(without_idle_fields(fields, IDLE_EMBEDDING_FIELDS), EmbeddingBody))


def _read_pooling(fields: Mapping[str, Any]) -> GenerationRequest:
    request = _read_pooled(body := convert(without_idle_fields(fields, IDLE_POOLING_FIELDS), PoolingBody))
    return replace(request, add_special_tokens=body.add_special_tokens)


def _read_pooled(body: EmbeddingBody) -> GenerationRequest:
    """Return a completion whose single token is dropped."""
    if body.encoding_format not in ("float", "base64"):
        raise refusal("encoding_format", "must be float or base64")
    same = {name: getattr(body, name) for name in ("model", "truncate_prompt_tokens", "timeout", "priority", "user")}
    try:
        request = _read_completion({**same, "prompt": body.input, **_ONE_TOKEN})
    except RequestError as error:
        raise with_own_field_names(error) from None
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
"""Minimum-length prompts for a body."""


def _prompts(prompt: str | list[str | int | list[int]]) -> tuple[str | tuple[int, ...], ...]:
    is_one = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
    entries: Sequence[Any] = [prompt] if is_one else prompt
    if len(entries) > MAX_PROMPTS:
        raise refusal("prompt", f"has more than {MAX_PROMPTS} entries")
    if not entries or not all(entries):
        raise refusal("prompt", "must not be empty")
    if all(isinstance(text, str) for text in entries):
        return tuple(entries)
    if not all(isinstance(ids, list) and all(isinstance(token, int) for token in ids) for ids in entries):
        raise refusal("prompt", "must be texts or token ids, not a mixture")
    return tuple(map(tuple, entries))


def _sampling(body: GenerationBody, max_tokens: int | None, logprobs: int | None) -> RequestedSampling:
    check_ranges(body)
    if max_tokens is not None and body.min_tokens > max_tokens:
        raise refusal("min_tokens", "must not exceed 'max_tokens'")
    if len(body.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise refusal("stop_token_ids", f"has more than {MAX_STOP_TOKEN_IDS} entries")
    if body.truncate_prompt_tokens == 0:
        raise refusal("truncate_prompt_tokens", "must be at least 1, or -1 for what fits")
    if len(body.allowed_token_ids) > MAX_ALLOWED_TOKEN_IDS:
        raise refusal("allowed_token_ids", f"has more than {MAX_ALLOWED_TOKEN_IDS} entries")
    best_of, beam = _choices(body)
    grammar = read_grammar(body)
    if grammar is not None and beam is not None and body.ignore_eos:
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
        allowed_token_ids=tuple(dict.fromkeys(body.allowed_token_ids)),
        bad_words=_bad_words(body.bad_words),
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
        logit_bias=_logit_bias(body.logit_bias),
        grammar=grammar,
        n=body.n,
        best_of=best_of,
        beam=beam,
    )


_SAMPLING_IN_BEAMS = {"temperature": (0, 1), "top_p": (1,), "top_k": (-1, 0), "min_p": (0,)}
"""Values of sampling fields that are valid with beam search."""


def _choices(body: GenerationBody) -> tuple[int, BeamSearch | None]:
    if body.use_beam_search:
        return _beams(body)
    for name, neutral in (("beam_width", None), ("length_penalty", 1.0), ("early_stopping", False)):
        if getattr(body, name) != neutral:
            raise refusal(name, "needs 'use_beam_search' to be true")
    best_of = body.n if body.best_of is None else body.best_of
    if best_of < body.n:
        raise refusal("best_of", "must not be less than 'n'")
    return best_of, None


def _beams(body: GenerationBody) -> tuple[int, BeamSearch]:
    for name, neutral in _SAMPLING_IN_BEAMS.items():
        if getattr(body, name) not in (None, *neutral):
            raise refusal(name, "asks for sampling, and beam search does not sample")
    if isinstance(body.early_stopping, str) and body.early_stopping != "never":
        raise refusal("early_stopping", "must be true, false or 'never'")
    # vLLM's beam width is best_of, or n.
    width = body.beam_width or body.best_of or body.n
    if body.best_of not in (None, width):
        raise refusal("best_of", "contradicts 'beam_width'")
    if width > MAX_BEAM_WIDTH:
        raise refusal("beam_width", f"must be between 1 and {MAX_BEAM_WIDTH}")
    if body.n > width:
        raise refusal("n", "must not exceed 'beam_width'")
    early_stopping: bool | Literal["never"] = "never" if body.early_stopping == "never" else bool(body.early_stopping)
    return 1, BeamSearch(width=width, length_penalty=body.length_penalty, early_stopping=early_stopping)


def _bad_words(words: list[str]) -> tuple[str, ...]:
    if len(words) > MAX_BAD_WORDS:
        raise refusal("bad_words", f"has more than {MAX_BAD_WORDS} entries")
    if any(not word.strip(" ") or len(word) > MAX_BAD_WORD_CHARS for word in words):
        raise refusal("bad_words", f"has a word that is empty or longer than {MAX_BAD_WORD_CHARS} characters")
    return tuple(dict.fromkeys(words))


def _logit_bias(bias: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    if len(bias) > MAX_LOGIT_BIAS:
        raise refusal("logit_bias", f"has more than {MAX_LOGIT_BIAS} entries")
    # One spelling per id: int() would also accept "１２", " 1_0 " and "+1".
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
    for name in ("user", "safety_identifier", "prompt_cache_key", "session_id", "cache_salt"):
        check_length(name, getattr(body, name), MAX_LABEL_CHARS)
    if body.request_id and not is_client_id(body.request_id):
        raise refusal("request_id", "must be 1 to 128 visible ASCII characters")
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
        has_token_ids=body.return_token_ids,
        stream=body.stream,
        include_usage=include_usage,
        usage_in_chunks=include_usage and bool(body.stream_options.continuous_usage_stats),
        timeout_s=body.timeout,
        priority=body.priority,
        client_id=body.request_id,
        cache_salt=body.cache_salt,
        resumable=body.resumable,
        background=body.background,
    )


def _includes_usage(body: GenerationBody) -> bool:
    """Return whether a stream ends with its usage. As in vLLM, usage in every chunk implies it unless refused."""
    options = body.stream_options
    if options != StreamOptions() and not body.stream:
        raise refusal("stream_options", "needs 'stream' to be true")
    if options.include_obfuscation:
        raise refusal("stream_options.include_obfuscation", "is not supported here when true")
    return bool(options.continuous_usage_stats if options.include_usage is None else options.include_usage)


def _or(value: int | None, default: int) -> int:
    return default if value is None else value
