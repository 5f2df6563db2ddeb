"""A worker without a model: answers jobs by a script, through the worker's end of a queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from msgspec.structs import replace

from service.errors import EndReason
from service.queue.codec import pack_floats, pack_ids, unpack_ids
from service.queue.interface import WorkerQueue
from service.queue.messages import BlockTable, Cancel, Event, Job, Part, TokenLogprobs, Usage, WorkerCard


@dataclass(frozen=True)
class Script:
    """Script of one job: tokens per step, then its end. `end` None: silent until cancelled. `branches`: tokens of each
    branch, if they differ; `scores`: their log-probabilities; `choices`: branches of the answer.
    """

    steps: Sequence[Sequence[int]] = ()
    end: EndReason | None = EndReason.STOP
    step_s: float = 0.0
    branches: Sequence[Sequence[Sequence[int]]] = ()
    scores: Sequence[float] = ()
    choices: tuple[int, ...] = ()
    embedding: tuple[float, ...] = ()
    drafts: tuple[int, int] | None = None  # accepted, rejected


SILENT = Script()


class ScriptedWorker:
    """Worker that runs inside `working`. `jobs` and `cancels`: those received, in order."""

    def __init__(self, queue: WorkerQueue, model: str, script: Callable[[Job], Script], max_model_len: int = 4096):
        self._queue = queue
        self._model = model
        self._max_model_len = max_model_len
        self.script = script
        self.ready = True
        self.paused = False
        self.is_fetching = False
        self.stats: dict[str, float] = {}
        self.blocks = self.host_blocks = b""
        self.tables: tuple[BlockTable, ...] = ()
        self.jobs: list[Job] = []
        self.cancels: list[Cancel] = []
        self._running: dict[str, asyncio.Task[None]] = {}
        self._numbers: dict[str, int] = {}
        self._stopped: set[tuple[str, int]] = set()

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

    async def announce(self) -> bool:
        card = WorkerCard(
            worker_id="scripted",
            model=self._model,
            ready=self.ready,
            max_model_len=self._max_model_len,
            num_blocks=64,
            block_size=16,
            beat_at_s=0.0,
            blocks=self.blocks,
            host_blocks=self.host_blocks,
            stats=self.stats,
            tables=self.tables,
        )
        return await self._queue.announce(card)

    async def publish(self, events: Sequence[Event]) -> None:
        """Write events of jobs whose script is silent, all in one call."""
        assert not await self._queue.publish(events)

    async def cancelled(self, number: int = 1) -> Cancel:
        """Wait for the `number`th cancel."""
        while len(self.cancels) < number:
            await asyncio.sleep(0.005)
        return self.cancels[number - 1]

    async def _fetch(self) -> None:
        while True:
            while self.paused:
                await asyncio.sleep(0.01)
            self.is_fetching = True
            claims = await self._queue.fetch(256, 0.2)
            self.is_fetching = False
            for claim in claims:
                self.jobs.append(claim.job)
                self._running[claim.job.job_id] = asyncio.create_task(self._run(claim.job))

    async def _hear_cancels(self) -> None:
        while True:
            for cancel in await self._queue.fetch_cancels(0.2):
                self.cancels.append(cancel)
                task = self._running.get(cancel.job_id)
                if task is None or task.done():
                    continue
                if cancel.branch is not None:
                    self._stopped.add((cancel.job_id, cancel.branch))
                    continue
                task.cancel()
                await self._end(cancel.job_id, cancel.reason, 0)

    async def _run(self, job: Job) -> None:
        script, sampling = self.script(job), job.sampling
        num_branches = sampling.beam.width if sampling.beam else sampling.best_of
        scripts = script.branches or [script.steps] * num_branches
        scores = script.scores or [-0.5] * len(scripts)
        branches = [
            _Branch(steps, sampling.max_tokens, script.end, score) for steps, score in zip(scripts, scores, strict=True)
        ]
        if sampling.prompt_logprobs is not None:
            await self._publish(Event(job_id=job.job_id, number=0, parts=(self._scored_prompt(job),)))
        while any(branch.end is None for branch in branches):
            if script.step_s:
                await asyncio.sleep(script.step_s)
            parts = [self._part(job, number, branch) for number, branch in enumerate(branches) if branch.end is None]
            if any(part.tokens or part.end for part in parts):
                await self._publish(Event(job_id=job.job_id, number=0, parts=tuple(parts)))
            else:
                await asyncio.sleep(0.005)
        # The worst end of its branches: reasons are in that order.
        end = max((branch.end for branch in branches), key=list(EndReason).index)
        num_tokens = sum(branch.num_received for branch in branches)
        await self._end(job.job_id, end, num_tokens, len(job.prompt) // 4, script)

    def _scored_prompt(self, job: Job) -> Part:
        """Return the prompt's part: token i has log-probability -i, and token 7 is the likeliest everywhere."""
        tokens, width = unpack_ids(job.prompt)[1:], job.sampling.prompt_logprobs
        logprobs = TokenLogprobs(
            chosen=pack_floats([-(i + 1) for i in range(len(tokens))]),
            top_ids=pack_ids([7 + k for _ in tokens for k in range(width)]),
            top=pack_floats([-0.25 for _ in tokens for _ in range(width)]),
        )
        return Part(tokens=pack_ids(tokens), logprobs=logprobs, is_prompt=True)

    def _part(self, job: Job, number: int, branch: _Branch) -> Part:
        """Return a branch's next part."""
        tokens = () if (job.job_id, number) in self._stopped else branch.step()
        if (job.job_id, number) in self._stopped:
            branch.end = EndReason.STOP
        logprobs = None
        width = 0 if job.sampling.logprobs is None and job.sampling.ranks_branches else job.sampling.logprobs
        if width is not None and tokens:
            logprobs = TokenLogprobs(
                chosen=pack_floats([branch.score] * len(tokens)),
                top_ids=pack_ids([(token + k) % 256 for token in tokens for k in range(width)]),
                top=pack_floats([-0.5 * (k + 1) for _ in tokens for k in range(width)]),
            )
        good_end = branch.end if branch.end in (EndReason.STOP, EndReason.LENGTH) else None
        return Part(branch=number, tokens=pack_ids(tokens), logprobs=logprobs, end=good_end)

    async def _end(
        self, job_id: str, end: EndReason, num_tokens: int, num_prompt_tokens: int = 0, script: Script = SILENT
    ) -> None:
        usage = Usage(prompt_tokens=num_prompt_tokens, completion_tokens=num_tokens)
        if script.drafts is not None:
            accepted, rejected = script.drafts
            usage = replace(usage, accepted_prediction_tokens=accepted, rejected_prediction_tokens=rejected)
        vector = pack_floats(script.embedding) or None
        event = Event(job_id=job_id, number=0, end=end, usage=usage, choices=script.choices, embedding=vector)
        await self._publish(event)

    async def _publish(self, event: Event) -> None:
        """Publish an event with the job's next number."""
        number = self._numbers[event.job_id] = self._numbers.get(event.job_id, 0) + 1
        if number == 1:
            event = replace(event, usage=Usage(prompt_tokens=0, completion_tokens=0, cached_tokens=1))
        await self._queue.publish([replace(event, number=number)])


class _Branch:
    """The rest of a branch."""

    def __init__(self, steps: Sequence[Sequence[int]], max_tokens: int, end: EndReason | None, score: float):
        self.score = score
        self._steps = list(steps)
        self._max_tokens = max_tokens
        self._last = end
        self.num_received = 0
        self.end: EndReason | None = None if steps else end

    def step(self) -> Sequence[int]:
        if not self._steps:
            return ()
        tokens = self._steps.pop(0)[: self._max_tokens - self.num_received]
        self.num_received += len(tokens)
        if self.num_received == self._max_tokens:
            self.end = EndReason.LENGTH
        elif not self._steps:
            self.end = self._last
        return tokens
