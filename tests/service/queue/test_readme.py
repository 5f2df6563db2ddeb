"""The page for foreign producers is true: its fields, its programs, its access rules."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from service.errors import EndReason
from service.queue import messages
from service.queue.codec import decode, encode
from service.queue.interface import Standing
from service.queue.messages import Cancel, IngressJob, Reply, Usage
from tests.support.configured_redis import GATEWAY, PRODUCER, WORKER
from tests.support.wire import Ended, make_card, make_event, make_job, outcome

README = Path(messages.__file__).with_name("README.md").read_text()


def block(language: str) -> str:
    return re.search(rf"```{language}\n(.*?)```", README, re.DOTALL)[1]


@pytest.mark.parametrize(
    "kind",
    [
        "IngressJob",
        "Reply",
        "Job",
        "Event",
        "Part",
        "TokenLogprobs",
        "Usage",
        "Cancel",
        "WorkerCard",
        "BlockTable",
        "DeadLetter",
    ],
)
def test_every_field_is_on_the_page(kind):
    table = re.search(rf"### {kind}\n(.*?)(?=\n##|\Z)", README, re.DOTALL)[1]
    written = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    in_code = list(getattr(messages, kind).__annotations__)
    assert [name for name in written if name != "v"] == [name for name in in_code if name != "v"]


async def answer_one(queue, replies: Sequence[Reply]) -> IngressJob:
    """Answer one entry as a gateway does; return its job."""
    (entry,) = await queue.ingress.fetch_entries(["alice"], 1, 10.0)
    job = decode(IngressJob, entry.payload)
    assert (await queue.ingress.begin_replies(entry, job.id)).standing is Standing.OURS
    for reply in replies:
        payload = encode(dataclasses.replace(reply, id=job.id))
        assert await queue.ingress.reply(entry, job.id, reply.number, payload, is_last=reply.done)
    await queue.ingress.settle_entry(entry)
    return job


async def run(*command: str, **environment: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **environment},
    )
    async with asyncio.timeout(20):
        out, err = await process.communicate()
    return process.returncode, out.decode(errors="replace"), err.decode(errors="replace")


USAGE = Usage(prompt_tokens=1, completion_tokens=2)


async def test_the_python_producer_gets_its_text(open_queue, redis_url, tmp_path):
    (tmp_path / "producer.py").write_text(block("python"))
    queue = await open_queue()
    running = asyncio.create_task(
        run(sys.executable, str(tmp_path / "producer.py"), redis_url, "alice", "m", "Tell me a story.")
    )
    job = await answer_one(
        queue, [Reply(id="", number=1, text="Once "), Reply(id="", number=2, text="upön", usage=USAGE, done=True)]
    )
    assert await running == (0, "Once upön\n", "")
    assert job.endpoint == "/v1/chat/completions"
    assert job.body["messages"] == [{"role": "user", "content": "Tell me a story."}]


async def test_the_python_producer_hears_of_an_error(open_queue, redis_url, tmp_path):
    (tmp_path / "producer.py").write_text(block("python"))
    queue = await open_queue()
    running = asyncio.create_task(run(sys.executable, str(tmp_path / "producer.py"), redis_url, "alice", "m", "x"))
    await answer_one(queue, [Reply(id="", number=1, error={"message": "No such model."}, done=True)])
    assert await running == (1, "", "No such model.\n")


@pytest.mark.skipif(shutil.which("redis-cli") is None, reason="no redis-cli on this machine")
async def test_the_redis_cli_producer_gets_its_text(open_queue, redis_url):
    queue = await open_queue()
    cli = f"redis-cli -s {redis_url.removeprefix('unix://')}"
    running = asyncio.create_task(run("bash", "-c", block("bash"), REDIS=cli, MODEL="m"))
    job = await answer_one(queue, [Reply(id="", number=1, text=" there was a fox", done=True)])
    status, out, err = await running
    assert (status, err) == (0, "")
    assert " there was a fox" in out
    assert job.body == {"model": "m", "prompt": "Once upon a time", "max_tokens": 32}


async def test_the_access_rules_are_enough_for_doors_and_workers(open_queue, guarded_redis):
    gateway = await open_queue("d", guarded_redis.url(GATEWAY))
    worker = await open_queue("w", guarded_redis.url(WORKER))
    await worker.announce(make_card("w1"))
    assert len(await gateway.workers()) == 1
    events = gateway.follow("JOB1")
    for number in (1, 2):
        await gateway.submit(make_job(f"JOB{number}"))
    await gateway.cancel(Cancel(job_id="JOB2", reason=EndReason.CANCELLED))
    assert len(await worker.fetch(4, 1.0)) == 1
    assert (await gateway.queue_state()).num_waiting == 0
    await worker.publish([make_event("JOB1", 1), make_event("JOB1", 2, EndReason.STOP)])
    assert await outcome(events) == Ended([1, 2], EndReason.STOP)
    assert (await outcome(gateway.follow("JOB2"))).reason is EndReason.CANCELLED
    await worker.retire("w1")
    guarded_redis.admin.xadd("{quire}:ingress:alice", {"m": b"x"})
    (entry,) = await gateway.ingress.fetch_entries(["alice"], 4, 1.0)
    assert (await gateway.ingress.begin_replies(entry, "a1")).standing is Standing.OURS
    assert await gateway.ingress.reply(entry, "a1", 1, b"y", is_last=True)
    await gateway.ingress.settle_entry(entry)
    await work_that_fails(gateway, worker, guarded_redis.url(WORKER), open_queue)


async def work_that_fails(gateway, worker, worker_url, open_queue):
    """Make the calls that a worker makes when jobs fail."""
    for number in (3, 4):
        await gateway.submit(make_job(f"JOB{number}", deadline_s=await gateway.now_s() + 60))
    await worker.fetch(2, 1.0)
    await worker.renew()
    await worker.publish([make_event("JOB4", 1)])
    await gateway.cancel(Cancel(job_id="JOB4", reason=EndReason.STOP, branch=1))
    assert len(await worker.fetch_cancels(1.0)) == 1
    for _ in range(2):
        await worker.hand_back(["JOB3"], "a test")
        await worker.fetch(1, 0.0)
    assert (await worker.renew()).runs_suspects
    assert (await worker.fetch_suspect()).is_suspect
    await worker.hand_back(["JOB3"], "a test")
    assert list(await worker.fetch(1, 0.0)) == []
    assert (await outcome(gateway.follow("JOB3"))).reason is EndReason.POISONED
    await worker.renew()
    worker._claimed.doubt()
    await worker.renew()
    returned = await open_queue("w", worker_url)
    assert await returned.take_over() == 1
    assert [claim.attempt for claim in await returned.fetch(1, 1.0)] == [2]
    assert len(await returned.workers()) == 0


async def test_a_producer_reaches_its_own_keys_only(open_queue, configured_redis, tmp_path):
    (tmp_path / "producer.py").write_text(block("python"))
    queue = await open_queue(url=configured_redis.url(GATEWAY))
    url = configured_redis.url(PRODUCER)
    running = asyncio.create_task(run(sys.executable, str(tmp_path / "producer.py"), url, "alice", "m", "x"))
    await answer_one(queue, [Reply(id="", number=1, text="yes", usage=USAGE, done=True)])
    assert await running == (0, "yes\n", "")
    status, _, err = await run(sys.executable, str(tmp_path / "producer.py"), url, "bob", "m", "x")
    assert status == 1
    assert "NoPermission" in err or "No permissions" in err
