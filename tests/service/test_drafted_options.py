"""Any two options of a request, over HTTP and the queue, with drafts and without: the same answers.

Gateway, queue in memory and worker share a process; the demo model computes row by row, so that an answer's numbers do
not depend on the other requests.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import combinations
from typing import Any

import aiohttp
import msgpack
import pytest

from model.families.eagle3 import load_eagle3
from service.config.settings import Settings
from service.engine.drafting.drafter import SOURCES
from service.engine.drafting.ngram import NgramDrafter
from service.engine.drafting.suffix import SuffixDrafter
from service.engine.engine import Engine
from service.errors import EndReason
from service.gateway.core.served_model import ServedModel
from service.gateway.process import serving
from service.observability.tracing import NO_TRACING
from service.queue.codec import decode
from service.queue.messages import Reply, WorkerCard
from service.worker.engine_thread import EngineThread, Stop
from service.worker.job_loop import EngineSizes, JobLoop, OutputInbox
from tests.fakes.kept_grammar_process import kept_grammar_processes
from tests.fakes.queue.worker import MemoryWorkerQueue
from tests.support.demo_engine import DEMO, MAX_LEN, DemoEngines
from tests.support.gateway import QuickQueue
from tests.support.rowwise_ops import RowwiseOps

OPTIONS: dict[str, tuple[Any, ...]] = {
    "temperature": (0.0, 0.7),
    "top_k": (40,),
    "top_p": (0.9,),
    "min_p": (0.05,),
    "repetition_penalty": (1.2, 0.9),
    "frequency_penalty": (0.5,),
    "presence_penalty": (-0.5,),
    "min_tokens": (5,),
    "ignore_eos": (True,),
    "stop": (["e ", "fox"],),
    "stop_token_ids": ([262, 300, 301],),
    "logit_bias": ({"300": 3.0, "262": -100.0},),
    "allowed_token_ids": (list(range(5, 900)),),
    "bad_words": (["the"],),
    "guided_regex": ("[a-z ]{5,30}", "(the fox and the bear|a river) (ran|slept) far away"),
    "logprobs": (0, 3),
    "prompt_logprobs": (1,),
    "echo": (True,),
    "stream": (True,),
    "n": (2,),
    "best_of": (3,),
    "use_beam_search": (True,),
}
SAMPLING = ("temperature", "top_k", "top_p", "min_p")
NEVER_TOGETHER = {
    frozenset(each)
    for each in (
        ("best_of", "use_beam_search"),
        ("best_of", "stream"),
        ("prompt_logprobs", "stream"),
        ("echo", "logprobs", "prompt_logprobs"),
        ("guided_regex", "ignore_eos", "use_beam_search"),
        *((name, "use_beam_search") for name in SAMPLING),
    )
}
NOT_OVER_THE_QUEUE = {"logprobs", "prompt_logprobs", "echo"}
PROMPTS = ("The fox and the bear ran. The fox", "one two three one two three one two", [300, 301, 302] * 4)
METHODS = ("ngram", "suffix", "eagle3")
NUM_REQUESTS, SHARE = 30, 0.42
NUM_SLOTS, NUM_BLOCKS, BLOCK_SIZE = 8, 120, 16
VOCAB_SIZE = 4096
PRODUCER = "default"
PATIENCE_S = 240


def drawn_requests() -> list[dict[str, Any]]:
    rng, bodies = random.Random(14), []
    for number in range(NUM_REQUESTS):
        chosen = {name: rng.choice(values) for name, values in OPTIONS.items() if rng.random() < SHARE}
        for refused in sorted(NEVER_TOGETHER, key=sorted):
            if refused <= chosen.keys():
                del chosen[rng.choice(sorted(refused))]
        body = {"prompt": rng.choice(PROMPTS), "max_tokens": rng.randrange(6, 14), "seed": number, **chosen}
        bodies.append({**body, "model": "demo"})
    return bodies


BODIES = drawn_requests()


def test_every_pair_of_options_is_requested_together():
    missing = [two for two in combinations(OPTIONS, 2) if not any(set(two) <= body.keys() for body in BODIES)]
    assert {frozenset(two) for two in missing} == {two for two in NEVER_TOGETHER if len(two) == 2}


@pytest.fixture(scope="module")
def engines():
    return DemoEngines(RowwiseOps(kv_dtype=None))


@pytest.fixture(scope="module")
def wanted(engines):
    return asyncio.run(answers(engines, None))


@pytest.mark.parametrize("method", METHODS)
def test_drafts_change_no_answer(engines, wanted, method):
    received = asyncio.run(answers(engines, method))
    for body, one, other in zip(BODIES, received, wanted, strict=True):
        assert one == other, body


async def answers(engines: DemoEngines, method: str | None) -> list[Any]:
    """Return the answers to BODIES, over the queue where it carries them, else over HTTP."""
    engine, queue = make_engine(engines, method), QuickQueue()
    settings = Settings(model=DEMO, served_model_name="demo", port=0, drain_timeout=0.2, max_model_len=MAX_LEN)
    with kept_grammar_processes():
        async with (
            working(engine, queue),
            serving(settings, ServedModel.read(settings), queue) as url,
            aiohttp.ClientSession(url) as http,
            asyncio.timeout(PATIENCE_S),
        ):
            found = await asyncio.gather(
                *(
                    asked(http, body) if NOT_OVER_THE_QUEUE & body.keys() else produced(queue, str(number), body)
                    for number, body in enumerate(BODIES)
                )
            )
    await queue.close()
    stats = engine.stats()
    assert stats.num_blocks_used == 0
    if method is not None:
        assert stats.num_accepted_by_source[SOURCES.index(method)] > 0
    return found


def make_engine(engines: DemoEngines, method: str | None) -> Engine:
    sizes = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "max_num_seqs": NUM_SLOTS}
    if method == "eagle3":
        model = engines.model
        return engines.make(**sizes, draft=load_eagle3(DEMO / "eagle3", model.config, model.weights.embedding, MAX_LEN))
    suffix = SuffixDrafter(max_depth=24, max_requests=50, max_spec_factor=2.0, min_token_prob=0.1)
    return engines.make(**sizes, drafter={"ngram": NgramDrafter(1, 3), "suffix": suffix, None: None}[method])


@asynccontextmanager
async def working(engine: Engine, queue: QuickQueue) -> AsyncIterator[None]:
    """Serve the queue's jobs; fail with the engine's error."""
    loop, inbox = asyncio.get_running_loop(), OutputInbox()
    dead = loop.create_future()
    thread = EngineThread(engine, inbox.on_outputs, lambda error: loop.call_soon_threadsafe(dead.set_result, error))
    sizes = EngineSizes(VOCAB_SIZE, NUM_SLOTS, NUM_BLOCKS * BLOCK_SIZE)
    job_loop = JobLoop(MemoryWorkerQueue(queue.data), thread, inbox, card, sizes, NO_TRACING)
    thread.start()
    duties = asyncio.create_task(job_loop.run())
    try:
        yield
    finally:
        thread.send(Stop(EndReason.SHUTDOWN))
        duties.cancel()
        await asyncio.wait({duties})
        thread.join(10)
    assert not dead.done(), dead.result()


def card(ready: bool) -> WorkerCard:
    return WorkerCard(
        worker_id="w",
        model="demo",
        ready=ready,
        max_model_len=MAX_LEN,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        beat_at_s=0.0,
    )


async def asked(http: aiohttp.ClientSession, body: dict[str, Any]) -> Any:
    """Ask over HTTP; return what does not depend on how the answer was divided."""
    async with http.post("/v1/completions", json=body) as response:
        text = await response.text()
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    answers = [json.loads(line) for line in lines or [text]]
    assert "error" not in answers[-1], (answers[-1], body)
    found: dict[int, dict[str, Any]] = {}
    for choice in (choice for answer in answers for choice in answer["choices"]):
        own = found.setdefault(choice["index"], {"text": "", "logprobs": [], "prompt": choice.get("prompt_logprobs")})
        own["text"] += choice["text"]
        own["logprobs"] += zip(*(choice["logprobs"] or {}).values(), strict=True) if choice.get("logprobs") else []
        own["finish_reason"] = choice["finish_reason"]
    return found, [answer["usage"]["completion_tokens"] for answer in answers if answer.get("usage")]


async def produced(queue: QuickQueue, name: str, body: dict[str, Any]) -> Any:
    """Ask over the queue; return each choice's text, end and token counts."""
    payload = {"v": 1, "id": name, "endpoint": "/v1/completions", "body": body}
    await queue.produce(PRODUCER, msgpack.packb(payload))
    replies: list[Reply] = []
    while not (replies and replies[-1].done):
        await asyncio.sleep(0.01)
        replies = [decode(Reply, reply) for reply in queue.replies(PRODUCER, name)]
    assert not replies[-1].error, (replies[-1].error, body)
    found: dict[int, list[Any]] = {}
    for reply in replies:
        text, end = found.get(reply.index, ("", None))
        found[reply.index] = (text + reply.text, reply.finish_reason or end)
    return found, replies[-1].usage and replies[-1].usage.completion_tokens
