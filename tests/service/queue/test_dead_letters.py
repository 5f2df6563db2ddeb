"""Dead letters on Redis, and the verb that shows them."""

from __future__ import annotations

import pytest

from service.cli.main import main
from service.errors import EndReason
from service.queue.codec import decode
from service.queue.messages import Job
from service.queue.redis.dead_letters import RedisDeadLetters
from tests.support.wire import Ended, make_event, make_job, outcome


async def bury(queue, job_id: str, cause: str = "CUDA error 700") -> None:
    await queue.submit(make_job(job_id))
    for _ in range(2):
        await queue.fetch(1, 1.0)
        await queue.hand_back([job_id], cause)
    while await queue.fetch_suspect():
        await queue.hand_back([job_id], cause)
    assert list(await queue.fetch(1, 0.0)) == []
    assert (await outcome(queue.follow(job_id))).reason is EndReason.POISONED


async def test_dead_letters_keep_their_jobs_and_causes(open_queue):
    queue = await open_queue()
    dead = RedisDeadLetters(queue._link)
    assert list(await dead.letters()) == []
    await bury(queue, "JOB1")
    await bury(queue, "JOB2", "the worker w died")
    last, first = await dead.letters()
    assert (last.job_id, last.deaths, last.cause) == ("JOB2", 4, "the worker w died"), (
        "JOB1's deaths came shortly before"
    )
    assert (decode(Job, first.job), first.cause) == (make_job("JOB1"), "CUDA error 700")
    assert abs(first.buried_at_s - await queue.now_s()) < 60.0
    assert await dead.find("JOB1") == first
    assert await dead.find("JOB3") is None


async def test_a_requeued_job_runs_alone_and_its_letter_is_gone(open_queue):
    queue = await open_queue()
    dead = RedisDeadLetters(queue._link)
    await bury(queue, "JOB1")
    copy = await dead.requeue("JOB1")
    assert await dead.requeue("JOB1") is None
    assert list(await dead.letters()) == []
    assert list(await queue.fetch(1, 0.0)) == []
    claim = await queue.fetch_suspect()
    assert (claim.job.job_id, claim.job.prompt, claim.is_suspect) == (copy, make_job().prompt, True)
    await queue.publish([make_event(copy, 1, EndReason.STOP)])
    assert await outcome(queue.follow(copy)) == Ended([1], EndReason.STOP)


def run(capsys, *words: str) -> tuple[int, str]:
    status = main(["dead", *words])
    return status, capsys.readouterr().out


@pytest.fixture
async def buried(open_queue) -> None:
    queue = await open_queue()
    await bury(queue, "JOB1", "a \x1b[31mred\n cause")


def test_the_verb_lists_shows_and_requeues(buried, redis_url, capsys, monkeypatch):
    status, page = run(capsys, "list", "--redis-url", redis_url)
    assert status == 0
    assert page.splitlines()[1].startswith("JOB1 ")
    assert page.splitlines()[1].endswith("3  a ?[31mred? cause")
    monkeypatch.setenv("QUIRE_REDIS_URL", redis_url)
    status, page = run(capsys, "show", "JOB1")
    assert (status, "prompt         1 2 3" in page, "max_tokens=8" in page) == (0, True, True)
    assert run(capsys, "show", "JOB9")[0] == run(capsys, "requeue", "JOB9")[0] == 1
    status, copy = run(capsys, "requeue", "JOB1")
    assert (status, copy.startswith("again-")) == (0, True)
    assert run(capsys, "show", "JOB1")[0] == 1


@pytest.mark.parametrize(("words", "wrong"), [(["list"], "--redis-url"), (["show", "--redis-url=redis://h"], "id of")])
def test_missing_arguments_are_named(words, wrong, capsys, monkeypatch):
    monkeypatch.delenv("QUIRE_REDIS_URL", raising=False)
    assert main(["dead", *words]) == 2
    assert wrong in capsys.readouterr().err
