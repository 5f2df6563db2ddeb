"""A Redis Cluster of real servers on this machine: three primaries with a replica each, by TLS if asked."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.crc import key_slot
from redis.exceptions import RedisError

from service.errors import StartupError
from service.queue import keys
from service.queue.embedded import redis as embedded_redis
from tests.support.certificates import Certificates

START_WITHIN_S = 30.0
NODE_TIMEOUT_MS = 1000
"""Silence after which the other nodes take a node for dead."""
BUS_PORT_ABOVE = 10_000
"""Offset of a node's bus port."""
PORTS = (11_000, 22_000)
NUM_PRIMARIES = 3
NUM_SLOTS = 16384
SLOT = key_slot(keys.JOBS.encode())


class Node:
    """One server of a Cluster."""

    def __init__(self, folder: Path, certificates: Certificates | None):
        """Skip the test without a server that supports this."""
        folder.mkdir(parents=True)
        self._log = folder / "log"
        self._tls: dict[str, Any] = {}
        self.port = free_port()
        try:
            words = [embedded_redis.find_program(), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
        except StartupError as error:
            pytest.skip(str(error))
        words += ["--cluster-enabled", "yes", "--cluster-node-timeout", str(NODE_TIMEOUT_MS)]
        words += ["--cluster-replica-validity-factor", "0", "--cluster-require-full-coverage", "no"]
        if certificates is None:
            words += ["--port", str(self.port)]
        else:
            words += ["--port", "0", "--tls-port", str(self.port), "--tls-cluster", "yes", "--tls-replication", "yes"]
            words += ["--tls-cert-file", str(certificates.certificate), "--tls-key-file", str(certificates.key)]
            words += ["--tls-ca-cert-file", str(certificates.authority), "--tls-auth-clients", "no"]
            self._tls = {"ssl": True, "ssl_ca_certs": str(certificates.authority)}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(words, stdout=log, stderr=log)

    def ask(self, *words: str | int) -> Any:
        with Redis(port=self.port, **self._tls) as redis:
            return redis.execute_command(*words)

    def replication(self) -> dict[str, Any]:
        with Redis(port=self.port, **self._tls) as redis:
            return redis.info("replication")

    def until(self, is_so) -> None:
        give_up_s = time.monotonic() + START_WITHIN_S
        while True:
            try:
                if is_so(self):
                    return
            except (RedisError, OSError):
                if self.process.poll() is not None and "tls" in self._log.read_text().lower():
                    pytest.skip("the installed server is built without TLS")
            assert time.monotonic() < give_up_s, self._log.read_text()[-2000:]
            time.sleep(0.05)

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.send(signal.SIGKILL)
        self.process.wait()


class Cluster:
    """Nodes; `owner` has the queue's slot, `successor` is its replica."""

    def __init__(self, nodes: list[Node], certificates: Certificates | None):
        self._certificates = certificates
        primaries, replicas = nodes[:NUM_PRIMARIES], nodes[NUM_PRIMARIES:]
        bounds = [NUM_SLOTS * part // NUM_PRIMARIES for part in range(NUM_PRIMARIES + 1)]
        for number, node in enumerate(nodes):
            node.until(lambda node: node.ask("PING"))
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            nodes[0].ask("CLUSTER", "MEET", "127.0.0.1", node.port)
        for number, node in enumerate(primaries):
            node.ask("CLUSTER", "ADDSLOTSRANGE", bounds[number], bounds[number + 1] - 1)
        for node in nodes:
            node.until(lambda node: b"cluster_known_nodes:%d" % len(nodes) in node.ask("CLUSTER", "INFO"))
        for primary, replica in zip(primaries, replicas, strict=True):
            name = primary.ask("CLUSTER", "MYID").decode()
            replica.until(lambda node, name=name: node.ask("CLUSTER", "REPLICATE", name))
        for node in nodes:
            node.until(lambda node: b"cluster_slots_ok:%d" % NUM_SLOTS in node.ask("CLUSTER", "INFO"))
        for replica in replicas:
            replica.until(lambda node: node.replication()["master_link_status"] == "up")
        place = next(part for part in range(NUM_PRIMARIES) if bounds[part] <= SLOT < bounds[part + 1])
        self.owner, self.successor = primaries[place], replicas[place]
        self._others = [primary for primary in primaries if primary is not self.owner]

    @property
    def url(self) -> str:
        """Return a URL of two nodes without the queue's slot."""
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in self._others)
        if self._certificates is None:
            return f"redis+cluster://{hosts}"
        return f"rediss+cluster://{hosts}?ssl_ca_certs={self._certificates.authority}"


@contextmanager
def running_cluster(folder: Path, certificates: Certificates | None = None) -> Iterator[Cluster]:
    nodes: list[Node] = []
    try:
        nodes += [Node(folder / f"node{number}", certificates) for number in range(2 * NUM_PRIMARIES)]
        yield Cluster(nodes, certificates)
    finally:
        for node in nodes:
            node.kill()


def free_port() -> int:
    """Return a free port below the ephemeral ones."""
    while True:
        port = random.randrange(*PORTS)
        try:
            for wanted in (port, port + BUS_PORT_ABOVE):
                with socket.socket() as found:
                    found.bind(("127.0.0.1", wanted))
        except OSError:
            continue
        return port
