"""`quire serve` goes on when its Redis is killed: the same text, no request lost, the same data folder."""

import json
import os
import signal
import threading
import urllib.request
from pathlib import Path

from tests.support.served import Served

LONG = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 160, "temperature": 0, "ignore_eos": True}
NUM_AT_ONCE = 6


def complete(url, heard=None):
    """The text of one streamed completion; `heard` is set at its first piece."""
    body = json.dumps({**LONG, "stream": True}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    text = ""
    with urllib.request.urlopen(request, timeout=90) as response:
        for line in response:
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                assert "choices" in chunk, chunk
                text += chunk["choices"][0]["text"]
                if heard is not None:
                    heard.set()
    return text


def redis_pid(served):
    for pid in served.descendants():
        if Path(f"/proc/{pid}/comm").read_text().strip() in ("valkey-server", "redis-server"):
            return pid
    raise AssertionError(served.output)


def test_a_killed_redis_costs_none_a_token(tmp_path):
    served = Served(tmp_path)
    try:
        undisturbed = complete(served.url)
        texts, begun = [], [threading.Event() for _ in range(NUM_AT_ONCE)]
        clients = [
            threading.Thread(target=lambda heard=heard: texts.append(complete(served.url, heard))) for heard in begun
        ]
        for client in clients:
            client.start()
        assert all(heard.wait(30) for heard in begun)
        first = redis_pid(served)
        os.kill(first, signal.SIGKILL)
        for client in clients:
            client.join(90)
        assert texts == [undisturbed] * NUM_AT_ONCE, served.output
        assert redis_pid(served) != first
        assert complete(served.url) == undisturbed
        assert "restarting" in served.output
        assert served.terminate() == 0, served.output
    finally:
        served.kill()
