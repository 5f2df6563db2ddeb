"""A worker without a model: answers every job as a script says, through the worker's half of a broker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from service.errors import EndReason
from service.wire.broker import WorkerBroker
from service.wire.codec import pack_floats, pack_ids
from service.wire.messages import Cancel, Event, Job, Part, TokenLogprobs, Usage, WorkerCard


@dataclass(frozen=True)
class Script:
    """What one job gets: tokens a step, then its end. `end` None: it stays silent until it is cancelled."""

    steps: Sequence[Sequence[int]]
    end: EndReason | None = EndReason.STOP
    step_s: float = 0.0


class ScriptedWorker:
    """Runs inside `working`. `jobs` and `cancels` are what it was given, in order."""

    def __init__(self, broker: WorkerBroker, model: str, script: Callable[[Job], Script], max_model_len: int = 4096):
        self._broker = broker
        self._model = model
        self._max_model_len = max_model_len
        self.script = script
        self.ready = True
        self.paused = False
        self.stats: dict[str, float] = {}
        self.jobs: list[Job] = []
        self.cancels: list[Cancel] = []
        self._running: dict[str, asyncio.Task[None]] = {}
        self._numbers: dict[str, int] = {}

    @asynccontextmanager
    async def working(self):
        await self.announce()
        duties = [asyncio.create_task(duty()) for duty in (self._fetch, self._hear_cancels)]
        try:
            yield self
        finally:
            for task in (*duties, *self._running.values()):
                task.cancel()
            await asyncio.gather(*duties, *self._running.values(), return_exceptions=True)

    async def announce(self) -> None:
        card = WorkerCard(
            worker_id="scripted",
            model=self._model,
            ready=self.ready,
            max_model_len=self._max_model_len,
            num_blocks=64,
            block_size=16,
            beat_at_s=0.0,
            stats=self.stats,
        )
        await self._broker.announce(card)

    async def cancelled(self, number: int = 1) -> Cancel:
        """Waits for the `number`th cancel."""
        while len(self.cancels) < number:
            await asyncio.sleep(0.005)
        return self.cancels[number - 1]

    async def _fetch(self) -> None:
        while True:
            while self.paused:
                await asyncio.sleep(0.01)
            for claim in await self._broker.fetch(256, 0.2):
                self.jobs.append(claim.job)
                self._running[claim.job.job_id] = asyncio.create_task(self._run(claim.job))

    async def _hear_cancels(self) -> None:
        while True:
            for cancel in await self._broker.fetch_cancels(0.2):
                self.cancels.append(cancel)
                task = self._running.get(cancel.job_id)
                if task is not None and not task.done():
                    task.cancel()
                    await self._end(cancel.job_id, cancel.reason, 0)

    async def _run(self, job: Job) -> None:
        script = self.script(job)
        num_left, end = job.sampling.max_tokens, script.end
        for step in script.steps:
            if script.step_s:
                await asyncio.sleep(script.step_s)
            if len(step) >= num_left:
                step, end = step[:num_left], EndReason.LENGTH
            num_left -= len(step)
            await self._publish(job, step)
            if num_left == 0:
                break
        if end is not None:
            await self._end(job.job_id, end, job.sampling.max_tokens - num_left, len(job.prompt) // 4)

    async def _publish(self, job: Job, tokens: Sequence[int]) -> None:
        logprobs = None
        if (width := job.sampling.logprobs) is not None:
            logprobs = TokenLogprobs(
                chosen=pack_floats([-0.5] * len(tokens)),
                top_ids=pack_ids([(token + k) % 256 for token in tokens for k in range(width)]),
                top=pack_floats([-0.5 * (k + 1) for _ in tokens for k in range(width)]),
            )
        number = self._next_number(job.job_id)
        await self._broker.publish(
            [Event(job_id=job.job_id, number=number, parts=(Part(tokens=pack_ids(tokens), logprobs=logprobs),))]
        )

    async def _end(self, job_id: str, end: EndReason, num_tokens: int, num_prompt_tokens: int = 0) -> None:
        usage = Usage(prompt_tokens=num_prompt_tokens, completion_tokens=num_tokens, cached_tokens=1)
        await self._broker.publish([Event(job_id=job_id, number=self._next_number(job_id), end=end, usage=usage)])

    def _next_number(self, job_id: str) -> int:
        self._numbers[job_id] = self._numbers.get(job_id, 0) + 1
        return self._numbers[job_id]
