"""What happened to jobs, as their followers saw it and as their logs tell it, and whether that is what was promised."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass, field

import numpy as np
from redis import Redis

from model.ops.backend import open_ops
from model.sampling_params import SamplingParams
from service.engine.request import EngineRequest
from service.errors import EndReason
from service.queue import keys
from service.queue.codec import decode, pack_ids, unpack_floats, unpack_ids
from service.queue.messages import Event, Job, JobAdapter
from tests.support.chaos_adapters import adapter_of, source_in
from tests.support.demo_engine import DemoEngines
from tests.support.fleet import IS_FP8
from tests.support.queue_pair import QueuePair
from tests.support.rowwise_ops import RowwiseOps

PATIENCE_S = 120.0
LOGPROB_TOLERANCE = 1e-4
PROMPT = 1 << 20
"""Stands for the prompt where answers are kept by branch."""
_NUMBERS = itertools.count(1)


@dataclass
class Answer:
    """All that was told of a job: tokens and log-probabilities by branch, how it ended, the choices."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    end: EndReason | None = None
    choices: tuple[int, ...] = ()

    def received(self) -> list[list[int]]:
        return [self.tokens.get(branch, []) for branch in self.choices]


@dataclass
class Story:
    """One job and what its follower saw, with the times at which it saw it."""

    job: Job
    events: list[Event] = field(default_factory=list)
    seen_at_s: list[float] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(len(part.tokens) // 4 for event in self.events for part in event.parts)

    def answer(self) -> Answer:
        """Raises AssertionError where numbers do not run 1, 2, 3, ... or more than the last event ends the job."""
        numbers = [event.number for event in self.events]
        assert numbers == list(range(1, len(numbers) + 1)), (self.job.job_id, numbers)
        ends = [event.end for event in self.events]
        assert all(end is None for end in ends[:-1]), (self.job.job_id, ends)
        assert ends[-1] is not None, (self.job.job_id, "no end")
        return answer_of(self.events)

    def first_seen_after(self, moment_s: float) -> float:
        """Seconds from the moment to the first event after it."""
        return min(seen_s for seen_s in self.seen_at_s if seen_s > moment_s) - moment_s


def answer_of(events: list[Event]) -> Answer:
    answer = Answer(end=events[-1].end, choices=tuple(events[-1].choices))
    for event in events:
        for part in event.parts:
            place = PROMPT if part.is_prompt else part.branch
            answer.tokens.setdefault(place, []).extend(unpack_ids(part.tokens))
            if part.logprobs is not None:
                answer.logprobs.setdefault(place, []).extend(unpack_floats(part.logprobs.chosen))
    return answer


class Storyteller:
    """Submits jobs through a gateway and follows them."""

    def __init__(self, gateway: QueuePair):
        self._gateway = gateway
        self.stories: list[Story] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def tell(self, prompt: tuple[int, ...], deadline_s: float | None = None, **options) -> Story:
        now_s = await self._gateway.now_s()
        number = next(_NUMBERS)
        job = Job(
            job_id=f"JOB{number}",
            tenant="t",
            prompt=pack_ids(prompt),
            sampling=SamplingParams(**options),
            submitted_at_s=now_s,
            deadline_s=None if deadline_s is None else now_s + deadline_s,
            feed="chaos",
            adapter=adapter_of(number),
        )
        story = Story(job)
        events = self._gateway.follow(job.job_id)
        await self._gateway.submit(job)
        self.stories.append(story)
        self._tasks.append(asyncio.create_task(_follow(story, events)))
        return story

    async def over(self, within_s: float = PATIENCE_S) -> list[Story]:
        """All stories, told to their ends."""
        async with asyncio.timeout(within_s):
            await asyncio.gather(*self._tasks)
        return self.stories


async def _follow(story: Story, events) -> None:
    async for event in events:
        story.events.append(event)
        story.seen_at_s.append(time.monotonic())


async def until_received(story: Story, num_events: int, within_s: float = 30.0) -> None:
    async with asyncio.timeout(within_s):
        while len(story.events) < num_events:
            await asyncio.sleep(0.002)


class Goldens:
    """What each job's answer is when nothing happens: told by one engine in this process."""

    def __init__(self):
        ops, quantization = (RowwiseOps(), "fp8") if IS_FP8 else (open_ops("cpu", "float32", "float32"), "auto")
        self._engines = DemoEngines(ops, quantization)
        self._known: dict[tuple[bytes, SamplingParams, JobAdapter | None], Answer] = {}

    def of(self, job: Job) -> Answer:
        key = (job.prompt, job.sampling, job.adapter)
        if key not in self._known:
            self._known[key] = self._tell(job)
        return self._known[key]

    def _tell(self, job: Job) -> Answer:
        num_slots = int(job.adapter is not None)
        engine = self._engines.make(num_blocks=400, budget=256, max_num_seqs=16, num_adapter_slots=num_slots)
        prompt, adapter = tuple(unpack_ids(job.prompt)), source_in(job.adapter)
        engine.add_request(EngineRequest(request_id="golden", prompt=prompt, sampling=job.sampling, adapter=adapter))
        answer = Answer()
        while engine.has_work:
            engine.step()
            for output in engine.drain_request_outputs():
                for part in output.parts:
                    place = PROMPT if part.is_prompt else part.branch
                    answer.tokens.setdefault(place, []).extend(part.token_ids)
                    answer.logprobs.setdefault(place, []).extend(one.logprob for one in part.logprobs)
                answer.end, answer.choices = output.end, output.choices
        return answer


def check_stories(stories: list[Story], goldens: Goldens) -> None:
    """Every job has its golden's answer, and nothing beside it."""
    for story in stories:
        received, golden = story.answer(), goldens.of(story.job)
        assert (received.end, received.choices) == (golden.end, golden.choices), story.job.job_id
        assert received.tokens == golden.tokens, story.job.job_id
        for branch, logprobs in golden.logprobs.items():
            if logprobs:
                assert np.allclose(received.logprobs[branch], logprobs, atol=LOGPROB_TOLERANCE), story.job.job_id


def check_logs(redis: Redis, stories: list[Story]) -> None:
    """The logs say what the followers saw, with one end each; of the jobs nothing else is left in the queue."""
    for story in stories:
        entries = redis.xrange(keys.events(story.job.job_id))
        assert [int(entry_id.partition(b"-")[0]) for entry_id, _ in entries] == [event.number for event in story.events]
        assert [b"end" in entry for _, entry in entries] == [event.end is not None for event in story.events]
        assert [decode(Event, entry[b"m"]) for _, entry in entries] == story.events
    for hash_key in (keys.JOBS, keys.STATES, keys.CLAIMS):
        assert redis.hlen(hash_key) == 0, hash_key
    for stream in (keys.WAITING, keys.RETURNED, keys.SUSPECTS):
        assert redis.xlen(stream) == 0, stream
    assert redis.zcard(keys.DEADLINES) == 0
