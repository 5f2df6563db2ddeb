"""May it enter? A request becomes a job, or is refused with one error before it costs anybody anything."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import replace
from hashlib import sha256
from typing import Any

from model.sampling_params import SamplingParams
from service.config import Settings
from service.errors import RequestError
from service.gateway.generation.refusals import refusal, too_long
from service.gateway.generation.request import Request, SamplingWishes
from service.gateway.generation.served_model import ServedModel
from service.gateway.hall.back_pressure import RETRY_AFTER_S, BackPressure
from service.gateway.hall.fleet import Fleet, FleetView
from service.gateway.hall.ticket import Ticket, job_names
from service.wire.broker import BrokerUnavailable, DoorBroker
from service.wire.codec import pack_ids
from service.wire.messages import Job

CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


class Admission:
    def __init__(
        self,
        model: ServedModel,
        broker: DoorBroker,
        fleet: Fleet,
        pressure: BackPressure,
        settings: Settings,
        feed: str,
        pool: Executor,
    ) -> None:
        self._model = model
        self._broker = broker
        self._fleet = fleet
        self._pressure = pressure
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

    async def admit(self, request: Request, tenant: str, request_id: str | None = None) -> Ticket:
        """Raises RequestError: 400, 404, or 429 or 503 with Retry-After while there is no room or no queue.

        `request_id`: of a request that may have been admitted before, elsewhere; its seed, else drawn by chance,
        is then the same. Without it, it is a new one.
        """
        self._model.require(request.model)
        self._check_choices(request)
        view = await self._room(tenant, len(request.prompts))
        timeout_s = self._timeout_s(request)
        self._check_ids(request)
        max_model_len = view.max_model_len(self._model.max_model_len)
        if _is_read_at_once(request):
            prompts, texts, grammar = self._understand(request, max_model_len)
        else:
            loop = asyncio.get_running_loop()
            prompts, texts, grammar = await loop.run_in_executor(self._pool, self._understand, request, max_model_len)
        job_id = request_id or new_job_id()
        if request.sampling.seed is None:
            seed = secrets.randbits(64) if request_id is None else _seed_of(request_id)
            request = replace(request, sampling=replace(request.sampling, seed=seed))
        samplings = self._samplings(request, [len(prompt) for prompt in prompts], max_model_len)
        try:
            now_s = await self._broker.now_s()
        except BrokerUnavailable:
            raise unavailable() from None
        jobs = tuple(
            Job(
                job_id=name,
                tenant=tenant,
                prompt=pack_ids(prompt),
                sampling=replace(sampling, grammar=grammar),
                submitted_at_s=now_s,
                deadline_s=now_s + timeout_s,
                feed=self._feed,
                priority=request.priority,
                is_batch=request.is_batch,
                model=self._model.name,
            )
            for name, prompt, sampling in zip(job_names(job_id, len(prompts)), prompts, samplings, strict=True)
        )
        return Ticket(
            request=request,
            request_id=job_id,
            tenant=tenant,
            created_s=now_s,
            timeout_s=timeout_s,
            num_prompt_tokens=tuple(map(len, prompts)),
            prompt_texts=texts,
            first_ids=() if request.sampling.prompt_logprobs is None else tuple(prompt[0] for prompt in prompts),
            jobs=jobs,
        )

    def _check_choices(self, request: Request) -> None:
        most, wishes = self._settings.max_n, request.sampling
        for name, value in (("n", wishes.n), ("best_of", wishes.best_of)):
            if value > most:
                raise refusal(name, f"must be at most {most} here")

    def _understand(self, request: Request, max_model_len: int) -> tuple[list[list[int]], tuple[str, ...], str | None]:
        """Token ids and, where they are told again, texts of the prompts, and the grammar. May take long."""
        prompts = self._encode(request, max_model_len)
        return prompts, self._prompt_texts(request, prompts), self._model.grammar(request)

    def _encode(self, request: Request, max_model_len: int) -> list[list[int]]:
        return [
            self._kept(request, self._model.encode(p, request.add_special_tokens), max_model_len)
            for p in request.prompts
        ]

    def _kept(self, request: Request, prompt: list[int], max_model_len: int) -> list[int]:
        """What `truncate_prompt_tokens` leaves of a prompt."""
        most = request.truncate_prompt_tokens
        if most is None:
            return prompt
        if most < 0:
            most = max(1, max_model_len - (request.sampling.max_tokens or 1))
        return prompt[-most:]

    def _prompt_texts(self, request: Request, prompts: Sequence[list[int]]) -> tuple[str, ...]:
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
            raise RequestError(
                503, "The server is shutting down.", "server_error", code="draining", retry_after_s=RETRY_AFTER_S
            )
        self._pressure.check(tenant, num_jobs)
        try:
            view = await self._fleet.rough_view()
        except BrokerUnavailable:
            raise unavailable() from None
        self._pressure.see(view)
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

    def _samplings(self, request: Request, lengths: Sequence[int], max_model_len: int) -> list[SamplingParams]:
        """By prompt. Raises RequestError (400) where one is too long or all together cost too much."""
        wishes, param = request.sampling, "messages" if request.is_chat else "prompt"
        budget = self._settings.max_request_tokens
        fair_share = (budget - sum(lengths)) // (wishes.num_branches * len(lengths))
        samplings = []
        for length in lengths:
            room = max_model_len - length
            max_tokens = min(room, max(fair_share, 1)) if wishes.max_tokens is None else wishes.max_tokens
            if room < 1 or max_tokens > room or wishes.min_tokens > max_tokens:
                raise too_long(max_model_len, param)
            samplings.append(self._sampling(wishes, max_tokens))
        if sum(lengths) + wishes.num_branches * sum(sampling.max_tokens for sampling in samplings) > budget:
            raise RequestError(
                400,
                f"The prompts and the tokens asked for, over all choices, exceed {budget} tokens.",
                param="max_tokens",
                code="request_too_large",
            )
        return samplings

    def _sampling(self, wishes: SamplingWishes, max_tokens: int) -> SamplingParams:
        chance = self._chance(wishes) if wishes.beam is None else {"temperature": 0.0, "top_k": None}
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=wishes.min_tokens,
            **chance,
            repetition_penalty=self._wished(wishes.repetition_penalty, "repetition_penalty", 1.0),
            presence_penalty=wishes.presence_penalty,
            frequency_penalty=wishes.frequency_penalty,
            seed=wishes.seed,
            stop_token_ids=wishes.stop_token_ids,
            ignore_eos=wishes.ignore_eos,
            logprobs=wishes.logprobs,
            prompt_logprobs=wishes.prompt_logprobs,
            logit_bias=wishes.logit_bias,
            n=wishes.n,
            best_of=wishes.best_of,
            pooling=self._settings.pooling if wishes.embeds else None,
            beam=wishes.beam,
        )

    def _chance(self, wishes: SamplingWishes) -> dict[str, Any]:
        """What shapes the distribution that is sampled from."""
        return {
            "temperature": self._wished(wishes.temperature, "temperature", 1.0),
            "top_k": int(self._wished(wishes.top_k, "top_k", 0)) or None,
            "top_p": self._wished(wishes.top_p, "top_p", 1.0),
            "min_p": self._wished(wishes.min_p, "min_p", 0.0),
        }

    def _wished(self, wish: float | None, name: str, neutral: float) -> float:
        return float(self._model.defaults.get(name, neutral) if wish is None else wish)


def _is_read_at_once(request: Request) -> bool:
    """Whether it takes less time to understand than to hand to a thread: the way there and back is long where the event
    loop is busy."""
    are_ids = all(isinstance(prompt, tuple) for prompt in request.prompts)
    return are_ids and not request.echo and request.sampling.grammar is None and request.tools is None


def new_job_id() -> str:
    """26 characters of Crockford's base 32, 128 bits of chance: nobody guesses another's job."""
    return _in_base_32(secrets.randbits(128))


def job_id_of(*names: str) -> str:
    """Of these names, the same wherever it is asked for."""
    return _in_base_32(int.from_bytes(sha256("\0".join(names).encode()).digest()[:16]))


def _in_base_32(bits: int) -> str:
    return "".join(CROCKFORD[(bits >> shift) & 31] for shift in range(125, -1, -5))


def _seed_of(request_id: str) -> int:
    return int.from_bytes(sha256(b"seed" + request_id.encode()).digest()[:8])


def unavailable() -> RequestError:
    """The 503 while the queue cannot be reached."""
    return RequestError(
        503, "The queue is not available now.", "server_error", code="unavailable", retry_after_s=RETRY_AFTER_S
    )
