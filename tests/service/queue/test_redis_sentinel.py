"""A primary, a replica and a Sentinel, all real: who asks the Sentinel survives the primary. And what is not served."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import RedisError

from service.errors import EndReason, StartupError
from service.queue.embedded import redis as embedded_redis
from service.queue.interface import QueueUnavailable
from tests.support.queue_pair import open_pair
from tests.support.redis_cluster import free_port
from tests.support.wire import Ended, make_event, make_events, make_job, outcome, take

START_WITHIN_S = 20.0
FAILOVER_WITHIN_S = 30.0


class Server:
    """A Redis on a port of this machine."""

    def __init__(self, folder: Path, *options: str, config: str | None = None):
        folder.mkdir()
        self.port = free_port()
        words = [embedded_redis.find_program()]
        if config is not None:
            (folder / "sentinel.conf").write_text(f"port {self.port}\ndir {folder}\n{config}")
            words += [str(folder / "sentinel.conf"), "--sentinel"]
        else:
            words += ["--port", str(self.port), "--dir", str(folder), "--save", "", *options]
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen([*words, "--bind", "127.0.0.1"], stdout=log, stderr=log)

    def ask(self, *words: str):
        with Redis(port=self.port) as redis:
            return redis.execute_command(*words)

    def until(self, is_so) -> None:
        give_up_s = time.monotonic() + START_WITHIN_S
        while True:
            try:
                if is_so():
                    return
            except (RedisError, OSError):
                pass
            assert time.monotonic() < give_up_s
            time.sleep(0.05)

    def kill(self) -> None:
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[tuple[Server, Server, Server]]:
    """Primary, replica, Sentinel."""
    primary = Server(tmp_path / "primary")
    servers = [primary]
    try:
        primary.until(lambda: primary.ask("PING"))
        servers.append(replica := Server(tmp_path / "replica", "--replicaof", "127.0.0.1", str(primary.port)))
        replica.until(lambda: b"master_link_status:up" in _raw_info(replica))
        watch = f"sentinel monitor quire 127.0.0.1 {primary.port} 1\nsentinel down-after-milliseconds quire 500\n"
        servers.append(sentinel := Server(tmp_path / "sentinel", config=watch))
        sentinel.until(lambda: sentinel.ask("SENTINEL", "REPLICAS", "quire"))
        yield primary, replica, sentinel
    finally:
        for server in servers:
            server.kill()


def _raw_info(server: Server) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall(b"INFO replication\r\n")
        return connection.recv(1 << 16)


async def test_a_failover_loses_no_job_and_ends_no_stream(watched):
    primary, replica, sentinel = watched
    queue = await open_pair(f"redis+sentinel://127.0.0.1:1,127.0.0.1:{sentinel.port}/quire/0", timeout_s=1.0)
    try:
        events = queue.follow("JOB1")
        await queue.submit(make_job())
        await queue.fetch(1, 1.0)
        await queue.publish(make_events("JOB1", [1, 2]))
        assert await take(events, 2) == [1, 2]
        assert primary.ask("WAIT", "1", "2000") == 1
        primary.kill()
        async with asyncio.timeout(FAILOVER_WITHIN_S):
            while True:
                try:
                    await queue.publish([make_event("JOB1", 3), make_event("JOB1", 4, EndReason.STOP)])
                    break
                except QueueUnavailable:
                    await asyncio.sleep(0.1)
        assert await outcome(events) == Ended([3, 4], EndReason.STOP)
        await queue.submit(make_job("JOB2"))
        state = await queue.queue_state()
        assert (state.lanes["normal"].num_jobs, state.num_leases) == (1, 1)
        assert [claim.job.job_id for claim in await queue.fetch(1, 1.0)] == ["JOB2"]
        assert b"role:master" in _raw_info(replica)
    finally:
        await queue.close()


async def test_sentinels_that_know_no_such_primary_are_no_answer(watched):
    with pytest.raises(QueueUnavailable, match="does not answer"):
        await open_pair(f"redis+sentinel://127.0.0.1:{watched[2].port}/other", timeout_s=1.0)


@pytest.mark.parametrize(
    ("url", "wrong"),
    [
        ("redis+sentinel://h", "names no primary"),
        ("redis+sentinel://h/quire/x", "no number"),
        ("redis+sentinel:///quire", "names no Sentinel"),
        ("redis+sentinel://h/quire?decode_responses=yes", "decode_responses"),
        ("redis+cluster://h:7000/1", "a Cluster has none"),
        ("redis+cluster://h,:7000", "names no node"),
    ],
)
async def test_a_wrong_url_is_refused_by_name(url, wrong):
    with pytest.raises(StartupError, match=wrong):
        await open_pair(url)


async def test_a_node_of_a_cluster_is_no_server_of_its_own(tmp_path):
    server = Server(tmp_path / "node", "--cluster-enabled", "yes")
    try:
        server.until(lambda: server.ask("PING"))
        with pytest.raises(StartupError, match="redis\\+cluster://"):
            await open_pair(f"redis://127.0.0.1:{server.port}")
    finally:
        server.kill()
