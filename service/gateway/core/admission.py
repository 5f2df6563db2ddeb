"""A `GenerationRequest` becomes an `AcceptedRequest` with its jobs, or one error."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from model.errors import GrammarError
from model.sampling_params import SamplingParams, TokenRules
from model.text.reasoning import ReasoningState
from service.config.settings import Settings
from service.errors import RequestError
from service.gateway.core.accepted_request import AcceptedRequest, new_request_id, seed_of
from service.gateway.core.back_pressure import BackPressure
from service.gateway.core.fleet import Fleet, FleetView
from service.gateway.core.refusals import draining, grammar_refusal, refusal, too_costly, too_long, unavailable
from service.gateway.core.request import GenerationRequest, RequestedSampling
from service.gateway.core.served_model import ServedModel
from service.gateway.core.text_threads import TextThreads
from service.gateway.grammars.pool import GrammarPool, PackedTask
from service.queue.codec import pack_ids
from service.queue.interface import GatewayQueue, QueueUnavailable
from service.queue.messages import Job


@dataclass(frozen=True)
class Tokenized:
    """Everything of a request that needs the tokenizer."""

    prompts: list[list[int]]  # token ids
    texts: tuple[str, ...]  # of the prompts, if the answer repeats them
    reasoning: ReasoningState
    rules: TokenRules | None
    task: PackedTask | None  # the grammar to compile


MAX_IDS_AT_ONCE = 4096


class Admission:
    def __init__(
        self,
        model: ServedModel,
        queue: GatewayQueue,
        fleet: Fleet,
        pressure: BackPressure,
        settings: Settings,
        feed: str,
        threads: TextThreads,
        grammars: GrammarPool,
    ) -> None:
        self._model = model
        self._queue = queue
        self._fleet = fleet
        self._pressure = pressure
        self._settings = settings
        self._feed = feed
        self._threads = threads
        self._grammars = grammars
        self._sampling = SamplingResolver(model.defaults, settings)
        self._draining = False

    @property
    def draining(self) -> bool:
        return self._draining

    def close(self) -> None:
        """Refuse every request with 503 from now on."""
        self._draining = True

    async def admit(self, request: GenerationRequest, tenant: str, request_id: str | None = None) -> AcceptedRequest:
        """Raises RequestError: 400, 404, or 429 or 503 with Retry-After while the queue is full or away.

        `request_id`: of a request that another gateway may have admitted; its default seed follows from the id.
        """
        self._model.require(request.model)
        if not self._model.generates and not request.sampling.embeds:
            raise RequestError(400, "This model has no head: it only embeds (/v1/embeddings).", param="model")
        request = replace(request, model=self._model.name)
        self._check_choices(request)
        view = await self._check_room(tenant, len(request.prompts))
        timeout_s = self._timeout_s(request)
        self._check_ids(request)
        max_model_len = view.max_model_len(self._model.max_model_len)
        read = await self._tokenized(request, tenant, max_model_len)
        prompts = read.prompts
        grammar = None if read.task is None else await self._compiled(request, read.task, tenant)
        seed = request.sampling.seed
        if seed is None:
            seed = secrets.randbits(64) if request_id is None else seed_of(request_id)
            request = replace(request, sampling=replace(request.sampling, seed=seed))
        sampling_params = self._sampling.by_prompt(request, seed, [len(prompt) for prompt in prompts], max_model_len)
        accepted = AcceptedRequest(
            request=request,
            request_id=request_id or new_request_id(),
            tenant=tenant,
            created_s=await self._now_s(),
            timeout_s=timeout_s,
            num_prompt_tokens=tuple(map(len, prompts)),
            prompt_texts=read.texts,
            reasoning=read.reasoning,
            first_ids=() if request.sampling.prompt_logprobs is None else tuple(prompt[0] for prompt in prompts),
        )
        constrained = [replace(one, grammar=grammar, rules=read.rules) for one in sampling_params]
        return replace(accepted, jobs=self._jobs(accepted, prompts, constrained))

    def _jobs(
        self, accepted: AcceptedRequest, prompts: Sequence[list[int]], sampling_params: Sequence[SamplingParams]
    ) -> tuple[Job, ...]:
        return tuple(
            Job(
                job_id=job_id,
                tenant=accepted.tenant,
                prompt=pack_ids(prompt),
                sampling=sampling,
                submitted_at_s=accepted.created_s,
                deadline_s=accepted.created_s + accepted.timeout_s,
                feed=self._feed,
                priority=accepted.request.priority,
                cache_salt=accepted.request.cache_salt,
                is_batch=accepted.request.is_batch,
                model=self._model.name,
            )
            for job_id, prompt, sampling in zip(accepted.job_ids, prompts, sampling_params, strict=True)
        )

    async def _now_s(self) -> float:
        try:
            return await self._queue.now_s()
        except QueueUnavailable:
            raise unavailable() from None

    def _check_choices(self, request: GenerationRequest) -> None:
        max_n, params = self._settings.max_n, request.sampling
        for name, value in (("n", params.n), ("best_of", params.best_of)):
            if value > max_n:
                raise refusal(name, f"must be at most {max_n} here")

    async def _tokenized(self, request: GenerationRequest, tenant: str, max_model_len: int) -> Tokenized:
        if _is_quick_to_tokenize(request):
            return self._tokenize(request, max_model_len)
        return await self._threads.run(tenant, self._tokenize, request, max_model_len)

    def _tokenize(self, request: GenerationRequest, max_model_len: int) -> Tokenized:
        prompts = self._encode(request, max_model_len)
        reasoning = self._model.reasoning_state(request, prompts[0])
        task = self._model.grammar_task(request, reasoning)
        return Tokenized(
            prompts=prompts,
            texts=self._prompt_texts(request, prompts),
            reasoning=reasoning,
            rules=self._model.token_rules(request, reasoning),
            task=None if task is None else PackedTask.of(task),
        )

    async def _compiled(self, request: GenerationRequest, task: PackedTask, tenant: str) -> str:
        requested = request.sampling.grammar
        try:
            return await self._grammars.compile(task, tenant)
        except GrammarError as error:
            raise grammar_refusal(error, "tools" if requested is None else requested.param) from None

    def _encode(self, request: GenerationRequest, max_model_len: int) -> list[list[int]]:
        prompts: list[list[int]] = []
        num_tokens = 0
        keeps_end = request.truncate_prompt_tokens is not None
        for prompt in request.prompts:
            ids = self._model.encode(prompt, request.add_special_tokens, keeps_end=keeps_end)
            prompts.append(self._truncated(request, ids, max_model_len))
            num_tokens += len(prompts[-1])
            if num_tokens > self._settings.max_request_tokens:  # do not encode the rest for nothing
                raise too_costly(self._settings.max_request_tokens)
        return prompts

    def _truncated(self, request: GenerationRequest, prompt: list[int], max_model_len: int) -> list[int]:
        num_kept = request.truncate_prompt_tokens
        if num_kept is None:
            return prompt
        if num_kept < 0:
            num_kept = max(1, max_model_len - (request.sampling.max_tokens or 1))
        return prompt[-num_kept:]

    def _prompt_texts(self, request: GenerationRequest, prompts: Sequence[list[int]]) -> tuple[str, ...]:
        """Return the prompts that the answer repeats: as sent, or as truncated."""
        if not request.echo:
            return ()
        decode = self._model.tokenizer.decode
        is_whole = request.truncate_prompt_tokens is None
        return tuple(
            text if isinstance(text, str) and is_whole else decode(ids, request.skip_special_tokens)
            for text, ids in zip(request.prompts, prompts, strict=True)
        )

    async def _check_room(self, tenant: str, num_jobs: int) -> FleetView:
        if self._draining:
            raise draining()
        self._pressure.check(tenant, num_jobs)
        try:
            view = await self._fleet.rough_view()
        except QueueUnavailable:
            raise unavailable() from None
        self._pressure.observe(view)
        return view

    def _timeout_s(self, request: GenerationRequest) -> float:
        max_s = self._settings.request_timeout
        if request.timeout_s is None:
            return max_s
        if request.timeout_s > max_s:
            raise RequestError(400, f"'timeout' must be at most {max_s:g} seconds.", param="timeout")
        return request.timeout_s

    def _check_ids(self, request: GenerationRequest) -> None:
        self._model.check_ids(request.sampling.stop_token_ids, "stop_token_ids")
        self._model.check_ids(request.sampling.allowed_token_ids, "allowed_token_ids")
        self._model.check_ids(tuple(token for token, _ in request.sampling.logit_bias), "logit_bias")


def _is_quick_to_tokenize(request: GenerationRequest) -> bool:
    """Return whether tokenizing is faster than a trip to a thread."""
    num_ids = sum(len(prompt) if isinstance(prompt, tuple) else MAX_IDS_AT_ONCE + 1 for prompt in request.prompts)
    is_plain = not request.echo and request.sampling.grammar is None and request.tools is None
    return num_ids <= MAX_IDS_AT_ONCE and is_plain


class SamplingResolver:
    """Fills in the model's sampling defaults and bounds a request's tokens."""

    def __init__(self, defaults: Mapping[str, float], settings: Settings) -> None:
        self._defaults = defaults
        self._settings = settings

    def by_prompt(
        self, request: GenerationRequest, seed: int, lengths: Sequence[int], max_model_len: int
    ) -> list[SamplingParams]:
        """`lengths`: the prompts' tokens. Raises RequestError (400)."""
        params, param = request.sampling, "messages" if request.is_chat else "prompt"
        budget = self._settings.max_request_tokens
        fair_share = (budget - sum(lengths)) // (params.num_branches * len(lengths))
        resolved = []
        for length in lengths:
            room = max_model_len - length
            most = min(room, max(fair_share, 1))
            max_tokens = most if params.max_tokens is None else params.max_tokens
            if params.fits_context:
                max_tokens = min(max_tokens, most)
            if room < 1 or max_tokens > room or params.min_tokens > max_tokens:
                raise too_long(max_model_len, param)
            resolved.append(self._resolve(params, seed, max_tokens))
        if sum(lengths) + params.num_branches * sum(one.max_tokens for one in resolved) > budget:
            raise too_costly(budget)
        return resolved

    def _resolve(self, params: RequestedSampling, seed: int, max_tokens: int) -> SamplingParams:
        distribution = self._distribution(params) if params.beam is None else {"temperature": 0.0, "top_k": None}
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=params.min_tokens,
            **distribution,
            repetition_penalty=self._or_default(params.repetition_penalty, "repetition_penalty", 1.0),
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            seed=seed,
            stop_token_ids=params.stop_token_ids,
            ignore_eos=params.ignore_eos,
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
            logit_bias=params.logit_bias,
            n=params.n,
            best_of=params.best_of,
            pooling=_pooling(self._settings) if params.embeds else None,
            beam=params.beam,
        )

    def _distribution(self, params: RequestedSampling) -> dict[str, Any]:
        return {
            "temperature": self._or_default(params.temperature, "temperature", 1.0),
            "top_k": int(self._or_default(params.top_k, "top_k", 0)) or None,
            "top_p": self._or_default(params.top_p, "top_p", 1.0),
            "min_p": self._or_default(params.min_p, "min_p", 0.0),
        }

    def _or_default(self, value: float | None, name: str, neutral: float) -> float:
        return float(self._defaults.get(name, neutral) if value is None else value)


def _pooling(settings: Settings) -> Literal["mean", "last"]:
    return "mean" if settings.pooling == "mean" else "last"
