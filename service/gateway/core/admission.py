"""Admission: turns a `GenerationRequest` into an `AcceptedRequest` with its jobs, or raises one error."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace

from model.errors import GrammarError
from model.sampling_params import SamplingParams
from service.config.settings import Settings
from service.errors import RequestError
from service.gateway.core.accepted_request import AcceptedRequest, new_request_id, seed_of
from service.gateway.core.adapters import Adapters
from service.gateway.core.back_pressure import BackPressure
from service.gateway.core.fleet import Fleet, FleetView
from service.gateway.core.prompt_reader import PromptReader, Tokenized
from service.gateway.core.refusals import draining, grammar_refusal, refusal, unavailable
from service.gateway.core.request import GenerationRequest
from service.gateway.core.sampling_resolver import SamplingResolver
from service.gateway.core.served_model import ServedModel
from service.gateway.core.text_threads import TextThreads
from service.gateway.grammars.pool import GrammarPool, PackedTask
from service.queue.codec import pack_ids
from service.queue.interface import GatewayQueue, QueueUnavailable
from service.queue.messages import Job, JobAdapter
from service.queue.records import AdapterRecord

MAX_IDS_AT_ONCE = 4096
MAX_SHOWN_IDS = 1 << 19
"""Half of a record's capacity."""


class TextStage:
    """Tokenizes prompts and compiles grammars; slow work runs off the event loop."""

    def __init__(self, model: ServedModel, settings: Settings, threads: TextThreads, grammars: GrammarPool) -> None:
        self.model = model
        self.settings = settings
        self._threads = threads
        self._grammars = grammars
        self._reader = PromptReader(model, settings)

    def check(self, request: GenerationRequest) -> None:
        """Raises RequestError for features that the model lacks."""
        self._reader.check(request)

    async def read(self, request: GenerationRequest, tenant: str, max_model_len: int) -> tuple[Tokenized, str | None]:
        """Return the prompts and the compiled grammar. Raises RequestError."""
        if _is_quick_to_tokenize(request):
            read, task = self._tokenize(request, max_model_len)
        else:
            read, task = await self._threads.run(tenant, self._tokenize, request, max_model_len)
        return read, None if task is None else await self._compiled(request, task, tenant)

    def _tokenize(self, request: GenerationRequest, max_model_len: int) -> tuple[Tokenized, PackedTask | None]:
        read = self._reader.read(request, max_model_len)
        return read, None if read.task is None else PackedTask.of(read.task)

    async def _compiled(self, request: GenerationRequest, task: PackedTask, tenant: str) -> str:
        requested = request.sampling.grammar
        try:
            return await self._grammars.compile(task, tenant)
        except GrammarError as error:
            raise grammar_refusal(error, "tools" if requested is None else requested.param) from None


class Admission:
    def __init__(
        self,
        text: TextStage,
        queue: GatewayQueue,
        fleet: Fleet,
        pressure: BackPressure,
        adapters: Adapters,
    ) -> None:
        self._model = text.model
        self._text = text
        self._queue = queue
        self._fleet = fleet
        self._pressure = pressure
        self._adapters = adapters
        self._feed = f"gateway-{secrets.token_hex(8)}"  # for the events of this gateway's jobs
        self._max_timeout_s = text.settings.request_timeout
        self._sampling = SamplingResolver(text.model.defaults, text.settings)
        self._draining = False

    @property
    def draining(self) -> bool:
        return self._draining

    def close(self) -> None:
        """Refuse all further requests with 503."""
        self._draining = True

    async def admit(self, request: GenerationRequest, tenant: str, request_id: str | None = None) -> AcceptedRequest:
        """Admit a request.

        `request_id` is set if another gateway may have admitted the request; it determines the default seed. Raises
        RequestError: 400; 404; 429 or 503 with Retry-After if the queue is full or unavailable.
        """
        adapter = await self._adapters.find(request.model)
        if not self._model.generates and not request.sampling.embeds:
            raise RequestError(400, "This model has no head: it only embeds (/v1/embeddings).", param="model")
        request = replace(request, model=self._model.name if adapter is None else adapter.name)
        self._text.check(request)
        view = await self._check_room(tenant, len(request.prompts))
        timeout_s = self._timeout_s(request)
        max_model_len = view.max_model_len(self._model.max_model_len)
        read, grammar = await self._text.read(request, tenant, max_model_len)
        prompts = read.prompts
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
            prompt_ids=_shown_ids(prompts) if request.has_token_ids else (),
        )
        constrained = [replace(one, grammar=grammar, rules=read.rules) for one in sampling_params]
        return replace(accepted, jobs=self._jobs(accepted, prompts, constrained, adapter))

    def _jobs(
        self,
        accepted: AcceptedRequest,
        prompts: Sequence[list[int]],
        sampling_params: Sequence[SamplingParams],
        adapter: AdapterRecord | None,
    ) -> tuple[Job, ...]:
        named = None if adapter is None else JobAdapter(name=adapter.name, path=adapter.path, digest=adapter.digest)
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
                adapter=named,
            )
            for job_id, prompt, sampling in zip(accepted.job_ids, prompts, sampling_params, strict=True)
        )

    async def _now_s(self) -> float:
        try:
            return await self._queue.now_s()
        except QueueUnavailable:
            raise unavailable() from None

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
        max_s = self._max_timeout_s
        if request.timeout_s is None:
            return max_s
        if request.timeout_s > max_s:
            raise RequestError(400, f"'timeout' must be at most {max_s:g} seconds.", param="timeout")
        return request.timeout_s


def _shown_ids(prompts: Sequence[list[int]]) -> tuple[tuple[int, ...], ...]:
    """Raises RequestError (400)."""
    if sum(map(len, prompts)) > MAX_SHOWN_IDS:
        raise refusal("return_token_ids", f"is for prompts of at most {MAX_SHOWN_IDS} tokens in all")
    return tuple(map(tuple, prompts))


def _is_quick_to_tokenize(request: GenerationRequest) -> bool:
    num_ids = sum(len(prompt) if isinstance(prompt, tuple) else MAX_IDS_AT_ONCE + 1 for prompt in request.prompts)
    is_plain = not request.echo and request.sampling.grammar is None and request.tools is None
    return num_ids <= MAX_IDS_AT_ONCE and is_plain
