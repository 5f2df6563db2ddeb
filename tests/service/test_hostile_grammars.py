"""Grammars that cannot be compiled, sent to a real service by HTTP, a producer and a batch: other tenants notice
nothing."""

from __future__ import annotations

import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any

import msgpack
import pytest
import redis

from service.gateway.http.auth import line_of
from tests.support.hostile_grammars import FIELDS, hostile_chat
from tests.support.served import Served, alive, descendants_of

GUEST, ATTACKER = "sk-guest-0123456789", "sk-attacker-0123456789"
PRODUCER = "attacker"
MAX_GATEWAY_BYTES = 600 << 20
SLOWEST_S = 8.0
"""Bound of another tenant's chat on a busy machine; an idle one answers in a tenth of a second."""
ATTACK_S = 3.0
DRAIN_S = 5
FORM = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"]}


@pytest.fixture
def served(tmp_path) -> Iterator[Served]:
    keys = tmp_path / "keys"
    lines = [line_of(key, name, None, None) for key, name in ((GUEST, "guest"), (ATTACKER, "bad"))]
    keys.write_text("\n".join(lines) + "\n")
    keys.chmod(0o600)
    flags = ("--api-key-file", str(keys), "--producers", PRODUCER, "--drain-timeout", str(DRAIN_S))
    running = Served(tmp_path / "data", *flags)
    try:
        yield running
    finally:
        running.kill()


def call(
    served: Served, path: str, key: str, body: Any = None, content_type: str = "application/json"
) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": content_type}
    request = urllib.request.Request(served.url + path, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def gateway_of(served: Served) -> int:
    for pid in served.descendants():
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"gateway" in words:
            return pid
    raise AssertionError("there is no gateway")


def resident_bytes(pids: set[int]) -> int:
    total = 0
    for pid in pids:
        try:
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:  # it has just ended
            continue
    return total


class Attack:
    """Threads that send hostile requests until they are stopped, each in its own way."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.statuses: list[int] = []
        self.codes: set[str] = set()
        self._stop = threading.Event()
        ways = [*(lambda name=name: self._post(name) for name in FIELDS), self._leave, self._produce, self._batch]
        self._threads = [threading.Thread(target=self._repeat, args=(way,), daemon=True) for way in ways]
        self._number = iter(range(10**6))

    def __enter__(self) -> Attack:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _repeat(self, way) -> None:
        while not self._stop.is_set():
            try:
                way()
            except (OSError, HTTPException, redis.RedisError):  # the service ends
                self._stop.wait(0.1)

    def _post(self, name: str) -> None:
        body = hostile_chat("demo", name, next(self._number))
        status, answer = call(self.served, "/v1/chat/completions", ATTACKER, body)
        self.statuses.append(status)
        if status != 200:  # some can be had
            self.codes.add(answer["error"]["code"])

    def _leave(self) -> None:
        """Asks and goes away."""
        body = json.dumps(hostile_chat("demo", "allOf", next(self._number))).encode()
        headers = {"Authorization": f"Bearer {ATTACKER}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.served.url + "/v1/chat/completions", body, headers)
        try:
            urllib.request.urlopen(request, timeout=0.3).close()
        except OSError:
            time.sleep(0.2)

    def _produce(self) -> None:
        with redis.Redis.from_url(self.served.redis_url) as queue:
            for name in FIELDS:
                number = next(self._number)
                body = hostile_chat("demo", name, number)
                job = {"v": 1, "id": f"job{number}", "endpoint": "/v1/chat/completions", "body": body}
                queue.xadd(f"{{quire}}:ingress:{PRODUCER}", {"m": msgpack.packb(job)})
        self._stop.wait(3)

    def _batch(self) -> None:
        lines = [
            {
                "custom_id": str(i),
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": hostile_chat("demo", name, i),
            }
            for i, name in enumerate(list(FIELDS) * 3, next(self._number) + 1000)
        ]
        data = "\n".join(map(json.dumps, lines))
        form = (
            '--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            f'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n{data}\r\n--b--\r\n'
        ).encode()
        status, file = call(self.served, "/v1/files", ATTACKER, form, "multipart/form-data; boundary=b")
        assert status == 200, file
        asked = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        status, batch = call(self.served, "/v1/batches", ATTACKER, asked)
        assert status == 200, batch
        self._stop.wait(5)


def chat_s(served: Served, **fields: Any) -> float:
    """Seconds that a guest's chat took."""
    begin_s = time.monotonic()
    body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **fields}
    status, answer = call(served, "/v1/chat/completions", GUEST, body)
    assert status == 200, answer
    return time.monotonic() - begin_s


def test_others_notice_nothing_and_the_service_ends_when_asked(served):
    gateway = gateway_of(served)
    chats_s: list[float] = []
    probes: list[int] = []
    most_bytes = number = 0
    slowest_probe_s = 0.0
    with Attack(served) as attack:
        end_s = time.monotonic() + ATTACK_S
        while time.monotonic() < end_s or len(attack.statuses) < 4 or "invalid_grammar" not in attack.codes:
            assert time.monotonic() < end_s + 60, "no attack was answered"
            number += 1
            form = {**FORM, "description": str(number)}
            asked = {"type": "json_schema", "json_schema": {"name": "n", "schema": form, "strict": True}}
            chats_s.append(chat_s(served) if number % 2 else chat_s(served, response_format=asked))
            most_bytes = max(most_bytes, resident_bytes({gateway, *descendants_of(gateway)}))
            begin_s = time.monotonic()
            probes.append(call(served, "/livez", GUEST)[0])
            slowest_probe_s = max(slowest_probe_s, time.monotonic() - begin_s)
            time.sleep(0.02)
        parts = served.descendants()
        begin_s = time.monotonic()
        status = served.terminate()
        ended_s = time.monotonic() - begin_s
    chats_s.sort()
    seen = {
        "num_chats": len(chats_s),
        "p50_s": round(chats_s[len(chats_s) // 2], 3),
        "p99_s": round(chats_s[int(len(chats_s) * 0.99)], 3),
        "slowest_probe_s": round(slowest_probe_s, 3),
        "most_mib": most_bytes >> 20,
        "end_s": round(ended_s, 2),
        "num_attacks": len(attack.statuses),
    }
    print(seen)
    assert chats_s[-1] < SLOWEST_S, seen
    assert slowest_probe_s < SLOWEST_S, seen
    assert most_bytes < MAX_GATEWAY_BYTES, seen
    assert set(probes) == {200}
    assert set(attack.statuses) <= {200, 400, 429, 503}
    assert "invalid_grammar" in attack.codes
    assert status == 0, served.output
    assert ended_s < DRAIN_S + 8, seen
    assert alive(parts) == set()
    assert "Traceback" not in served.output
