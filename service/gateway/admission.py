"""May it enter? A request becomes a job, or is refused with one error before it costs anybody anything."""

from __future__ import annotations

import asyncio
import secrets
from concurrent.futures import Executor
from dataclasses import dataclass

from model.sampling_params import SamplingParams
from service.config import Settings
from service.errors import RequestError
from service.gateway.fleet import Fleet, FleetView
from service.gateway.request import Request
from service.gateway.served_model import ServedModel, too_long
from service.wire.broker import BrokerUnavailable, DoorBroker
from service.wire.codec import pack_ids
from service.wire.messages import Job

CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
RETRY_AFTER_S = 2


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """An admitted request: the job to submit and what is needed to follow it."""

    request: Request
    job: Job
    num_prompt_tokens: int
    timeout_s: float


class Admission:
    def __init__(
        self, model: ServedModel, broker: DoorBroker, fleet: Fleet, settings: Settings, feed: str, pool: Executor
    ) -> None:
        self._model = model
        self._broker = broker
        self._fleet = fleet
        self._settings = settings
        self._feed = feed
        self._pool = pool
        self._draining = False

    @property
    def draining(self) -> bool:
        return self._draining

    def close(self) -> None:
        """From now on every request is refused with 503."""
        self._draining = True

    async def admit(self, request: Request, tenant: str) -> Ticket:
        """Raises RequestError: 400, 404, or 503 with Retry-After while there is no room or no queue."""
        self._model.require(request.model)
        view = await self._room()
        timeout_s = self._timeout_s(request)
        self._check_ids(request)
        loop = asyncio.get_running_loop()
        prompt = await loop.run_in_executor(self._pool, self._model.encode, request.prompt)
        sampling = self._sampling(request, len(prompt), view.max_model_len(self._model.max_model_len))
        try:
            now_s = await self._broker.now_s()
        except BrokerUnavailable:
            raise unavailable() from None
        job = Job(
            job_id=new_job_id(),
            tenant=tenant,
            prompt=pack_ids(prompt),
            sampling=sampling,
            submitted_at_s=now_s,
            deadline_s=now_s + timeout_s,
            feed=self._feed,
        )
        return Ticket(request=request, job=job, num_prompt_tokens=len(prompt), timeout_s=timeout_s)

    async def _room(self) -> FleetView:
        if self._draining:
            raise RequestError(
                503, "The server is shutting down.", "server_error", code="draining", retry_after_s=RETRY_AFTER_S
            )
        try:
            view = await self._fleet.view()
        except BrokerUnavailable:
            raise unavailable() from None
        if view.num_waiting + self._fleet.num_submitted >= self._settings.max_waiting:
            raise RequestError(
                503, "Too many requests are waiting.", "server_error", code="overloaded", retry_after_s=RETRY_AFTER_S
            )
        return view

    def _timeout_s(self, request: Request) -> float:
        longest_s = self._settings.request_timeout
        if request.timeout_s is None:
            return longest_s
        if request.timeout_s > longest_s:
            raise RequestError(400, f"'timeout' must be at most {longest_s:g} seconds.", param="timeout")
        return request.timeout_s

    def _check_ids(self, request: Request) -> None:
        self._model.check_ids(request.sampling.stop_token_ids, "stop_token_ids")
        self._model.check_ids(tuple(token for token, _ in request.sampling.logit_bias), "logit_bias")

    def _sampling(self, request: Request, num_prompt_tokens: int, max_model_len: int) -> SamplingParams:
        wishes, param = request.sampling, "messages" if request.is_chat else "prompt"
        room = max_model_len - num_prompt_tokens
        max_tokens = room if wishes.max_tokens is None else wishes.max_tokens
        if room < 1 or max_tokens > room or wishes.min_tokens > max_tokens:
            raise too_long(max_model_len, param)
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=wishes.min_tokens,
            temperature=self._wished(wishes.temperature, "temperature", 1.0),
            top_k=int(self._wished(wishes.top_k, "top_k", 0)) or None,
            top_p=self._wished(wishes.top_p, "top_p", 1.0),
            min_p=self._wished(wishes.min_p, "min_p", 0.0),
            repetition_penalty=self._wished(wishes.repetition_penalty, "repetition_penalty", 1.0),
            presence_penalty=wishes.presence_penalty,
            frequency_penalty=wishes.frequency_penalty,
            seed=secrets.randbits(64) if wishes.seed is None else wishes.seed,
            stop_token_ids=wishes.stop_token_ids,
            ignore_eos=wishes.ignore_eos,
            logprobs=wishes.logprobs,
            logit_bias=wishes.logit_bias,
        )

    def _wished(self, wish: float | None, name: str, neutral: float) -> float:
        return float(self._model.defaults.get(name, neutral) if wish is None else wish)


def new_job_id() -> str:
    """26 characters of Crockford's base 32, 128 bits of chance: nobody guesses another's job."""
    bits = secrets.randbits(128)
    return "".join(CROCKFORD[(bits >> shift) & 31] for shift in range(125, -1, -5))


def unavailable() -> RequestError:
    """The 503 while the queue cannot be reached."""
    return RequestError(
        503, "The queue is not available now.", "server_error", code="unavailable", retry_after_s=RETRY_AFTER_S
    )
