"""May it enter? A request becomes a job, or is refused with one error before it costs anybody anything."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace

from model.errors import GrammarError
from model.sampling_params import SamplingParams
from service.config.settings import Settings
from service.errors import RequestError
from service.gateway.core.accepted_request import AcceptedRequest
from service.gateway.core.back_pressure import RETRY_AFTER_S, BackPressure
from service.gateway.core.fleet import Fleet, FleetView
from service.gateway.core.job_ids import new_job_id, seed_of
from service.gateway.core.sampling import SamplingResolver
from service.gateway.core.text_threads import TextThreads
from service.gateway.generation.refusals import grammar_refusal, refusal, too_costly
from service.gateway.generation.request import GenerationRequest
from service.gateway.generation.served_model import ServedModel
from service.gateway.grammars.pool import GrammarPool, PackedTask
from service.queue.codec import pack_ids
from service.queue.interface import GatewayQueue, QueueUnavailable
from service.queue.messages import Job

UNAVAILABLE = "unavailable"
Tokenized = tuple[list[list[int]], tuple[str, ...], PackedTask | None]
"""Token ids and, where they are told again, texts of the prompts, and what holds the answer to its form."""
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
        """From now on every request is refused with 503."""
        self._draining = True

    async def admit(self, request: GenerationRequest, tenant: str, request_id: str | None = None) -> AcceptedRequest:
        """Raises RequestError: 400, 404, or 429 or 503 with Retry-After while there is no room or no queue.

        `request_id`: of a request that may have been admitted before, elsewhere; its seed, else drawn by chance,
        is then the same. Without it, it is a new one.
        """
        self._model.require(request.model)
        request = replace(request, model=self._model.name)
        self._check_choices(request)
        view = await self._room(tenant, len(request.prompts))
        timeout_s = self._timeout_s(request)
        self._check_ids(request)
        max_model_len = view.max_model_len(self._model.max_model_len)
        prompts, texts, task = await self._tokenized(request, tenant, max_model_len)
        grammar = None if task is None else await self._compiled(request, task, tenant)
        if request.sampling.seed is None:
            seed = secrets.randbits(64) if request_id is None else seed_of(request_id)
            request = replace(request, sampling=replace(request.sampling, seed=seed))
        sampling_params = self._sampling.by_prompt(request, [len(prompt) for prompt in prompts], max_model_len)
        accepted = AcceptedRequest(
            request=request,
            request_id=request_id or new_job_id(),
            tenant=tenant,
            created_s=await self._now_s(),
            timeout_s=timeout_s,
            num_prompt_tokens=tuple(map(len, prompts)),
            prompt_texts=texts,
            first_ids=() if request.sampling.prompt_logprobs is None else tuple(prompt[0] for prompt in prompts),
        )
        return replace(
            accepted, jobs=self._jobs(accepted, prompts, [replace(one, grammar=grammar) for one in sampling_params])
        )

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
        most, params = self._settings.max_n, request.sampling
        for name, value in (("n", params.n), ("best_of", params.best_of)):
            if value > most:
                raise refusal(name, f"must be at most {most} here")

    async def _tokenized(self, request: GenerationRequest, tenant: str, max_model_len: int) -> Tokenized:
        if _is_quick_to_read(request):
            return self._tokenize(request, max_model_len)
        return await self._threads.run(tenant, self._tokenize, request, max_model_len)

    def _tokenize(self, request: GenerationRequest, max_model_len: int) -> Tokenized:
        """May take long."""
        prompts = self._encode(request, max_model_len)
        task = self._model.grammar_task(request)
        return prompts, self._prompt_texts(request, prompts), None if task is None else PackedTask.of(task)

    async def _compiled(self, request: GenerationRequest, task: PackedTask, tenant: str) -> str:
        grammar = request.sampling.grammar
        try:
            return await self._grammars.compile(task, tenant)
        except GrammarError as error:
            raise grammar_refusal(error, "tools" if grammar is None else grammar.param) from None

    def _encode(self, request: GenerationRequest, max_model_len: int) -> list[list[int]]:
        prompts, num_tokens = [], 0
        keeps_end = request.truncate_prompt_tokens is not None
        for prompt in request.prompts:
            ids = self._model.encode(prompt, request.add_special_tokens, keeps_end=keeps_end)
            prompts.append(self._kept(request, ids, max_model_len))
            num_tokens += len(prompts[-1])
            if num_tokens > self._settings.max_request_tokens:  # the rest would be encoded for nothing
                raise too_costly(self._settings.max_request_tokens)
        return prompts

    def _kept(self, request: GenerationRequest, prompt: list[int], max_model_len: int) -> list[int]:
        """What `truncate_prompt_tokens` leaves of a prompt."""
        most = request.truncate_prompt_tokens
        if most is None:
            return prompt
        if most < 0:
            most = max(1, max_model_len - (request.sampling.max_tokens or 1))
        return prompt[-most:]

    def _prompt_texts(self, request: GenerationRequest, prompts: Sequence[list[int]]) -> tuple[str, ...]:
        """The prompts as the answer repeats them: as they came, or what is left of them."""
        if not request.echo:
            return ()
        decode = self._model.tokenizer.decode
        as_they_came = request.truncate_prompt_tokens is None
        return tuple(
            text if isinstance(text, str) and as_they_came else decode(ids, request.skip_special_tokens)
            for text, ids in zip(request.prompts, prompts, strict=True)
        )

    async def _room(self, tenant: str, num_jobs: int) -> FleetView:
        if self._draining:
            raise draining()
        self._pressure.check(tenant, num_jobs)
        try:
            view = await self._fleet.rough_view()
        except QueueUnavailable:
            raise unavailable() from None
        self._pressure.see(view)
        return view

    def _timeout_s(self, request: GenerationRequest) -> float:
        longest_s = self._settings.request_timeout
        if request.timeout_s is None:
            return longest_s
        if request.timeout_s > longest_s:
            raise RequestError(400, f"'timeout' must be at most {longest_s:g} seconds.", param="timeout")
        return request.timeout_s

    def _check_ids(self, request: GenerationRequest) -> None:
        self._model.check_ids(request.sampling.stop_token_ids, "stop_token_ids")
        self._model.check_ids(tuple(token for token, _ in request.sampling.logit_bias), "logit_bias")


def _is_quick_to_read(request: GenerationRequest) -> bool:
    """Whether it takes less time to understand than to hand to a thread: the way there and back is long where the event
    loop is busy."""
    are_few_ids = all(isinstance(prompt, tuple) for prompt in request.prompts) and (
        sum(map(len, request.prompts)) <= MAX_IDS_AT_ONCE
    )
    return are_few_ids and not request.echo and request.sampling.grammar is None and request.tools is None


def draining() -> RequestError:
    """The 503 of a gateway that ends."""
    message = "The server is shutting down."
    return RequestError(503, message, "server_error", code="draining", retry_after_s=RETRY_AFTER_S)


def unavailable() -> RequestError:
    """The 503 while the queue cannot be reached."""
    return RequestError(
        503, "The queue is not available now.", "server_error", code=UNAVAILABLE, retry_after_s=RETRY_AFTER_S
    )
