"""A Redis Cluster whose primary dies: what goes on at its replica, and what asynchronous replication may lose."""

from __future__ import annotations

import asyncio
import signal

import pytest

from service.errors import EndReason
from service.queue.messages import RequestRecord
from tests.support.certificates import OPENSSL, make_certificates
from tests.support.queue_pair import open_pair
from tests.support.redis_cluster import running_cluster
from tests.support.wire import make_job, persist
from tests.support.worker_harness import NUM_SLOTS, WorkerHarness, alone, read_events

PATIENCE_S = 40.0
NUM_TOKENS = 120
STEP_S = 0.01

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(params=["plain", "tls"])
def cluster(request, tmp_path):
    certificates = None
    if request.param == "tls":
        if OPENSSL is None:
            pytest.skip("openssl is not installed, which makes the certificates")
        certificates = make_certificates(tmp_path / "tls")
    with running_cluster(tmp_path / "cluster", certificates) as found:
        yield found


class Reader:
    """Events of one followed job, wherever its reader pauses."""

    def __init__(self, prompt, events):
        self._prompt, self._events = prompt, events
        self._heard = []

    async def hear_one(self):
        async with asyncio.timeout(PATIENCE_S):
            self._heard.append(await anext(self._events))

    async def hear_all(self):
        """Each token once, in its place, and no number of an event twice or missing."""
        tokens, end, usage = await read_events(self._events, self._heard, within_s=PATIENCE_S)
        assert (tokens, end) == (alone(self._prompt, NUM_TOKENS), EndReason.LENGTH)
        assert usage.completion_tokens == NUM_TOKENS


async def ask(worker, first_token):
    _, events = await worker.submit([first_token, 1], max_tokens=NUM_TOKENS)
    return Reader([first_token, 1], events)


async def test_every_token_is_sent_once_though_the_primary_dies(cluster):
    queue = await open_pair(cluster.url, timeout_s=1.0)
    try:
        async with WorkerHarness(queue, step_s=STEP_S) as worker:
            readers = [await ask(worker, n) for n in range(2 * NUM_SLOTS)]
            for reader in readers[:NUM_SLOTS]:
                await reader.hear_one()
            await asyncio.to_thread(cluster.owner.kill)
            readers.append(await persist(lambda: ask(worker, len(readers)), PATIENCE_S))
            for reader in readers:
                await reader.hear_all()
            assert cluster.successor.replication()["role"] == "master"
    finally:
        await queue.close()


@pytest.mark.parametrize("cluster", ["plain"], indirect=True)
async def test_what_the_replica_lacks_is_sent_again(cluster):
    """Nothing of running and waiting jobs is lost while their worker and gateway live; a request's record has no second
    copy."""
    gateway, queue = [await open_pair(cluster.url, timeout_s=1.0) for _ in range(2)]
    try:
        async with WorkerHarness(queue, step_s=STEP_S) as worker:
            early = [await ask(worker, n) for n in range(NUM_SLOTS)]
            for reader in early:
                await reader.hear_one()
            cluster.successor.send(signal.SIGSTOP)
            cluster.owner.ask("CLIENT", "KILL", "TYPE", "replica")
            behind = [await ask(worker, n) for n in range(NUM_SLOTS, 2 * NUM_SLOTS)]
            record = RequestRecord(
                request_id="R", tenant="t", endpoint="/v1/completions", outline=b"{}", digest=b"", created_s=1.0,
                deadline_s=await gateway.now_s() + 600, num_prompt_tokens=b"",
            )  # fmt: skip
            await gateway.submit(make_job("R", tenant="t", deadline_s=await gateway.now_s() + 600), record=record)
            assert await gateway.requests.get_request("R") == record
            for reader in early:
                await reader.hear_one()
            await asyncio.to_thread(cluster.owner.kill)
            cluster.successor.send(signal.SIGCONT)
            for reader in early + behind:
                await reader.hear_all()
            assert await persist(lambda: gateway.requests.get_request("R"), PATIENCE_S) is None
    finally:
        for opened in (gateway, queue):
            await opened.close()
