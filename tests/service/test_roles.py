"""Gateway, worker and producer, each a process that enters Redis under its own name, with its password from a file."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import pytest

from tests.support.certificates import OPENSSL, make_certificates
from tests.support.configured_redis import GATEWAY, PRODUCER, WORKER, ConfiguredRedis, password_of
from tests.support.parts import Part
from tests.support.served import REPOSITORY
from tests.support.tls_proxy import tls_in_front_of

BODY = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 40, "temperature": 0}


@pytest.fixture(scope="module")
def redis():
    with tempfile.TemporaryDirectory(prefix="quire-") as folder:
        server = ConfiguredRedis(Path(folder))
        yield server
        server.stop()


def start(folder: Path, verb: str, url: str, *flags: str) -> Part:
    password = folder / "password"
    folder.mkdir()
    password.write_text(password_of(GATEWAY if verb == "gateway" else WORKER) + "\n")
    part = Part(folder, verb, f"--redis-url={url}", f"--redis-password-file={password}", *flags)
    try:
        part.until_received("READY=1")
    except BaseException:
        part.close()
        raise
    return part


def ask(url, path, body=None, method=None, **headers):
    """JSON, or the text of a stream."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json", **headers}, method=method)
    with urllib.request.urlopen(request, timeout=60) as response:
        text = response.read().decode()
    return text if text.startswith(("data", "id", ":", "event")) else json.loads(text)


def text_of(answer):
    return answer["choices"][0]["text"]


def produce(redis, job_id):
    page = (REPOSITORY / "service" / "queue" / "README.md").read_text()
    example = page.split("```python\n", 1)[1].split("```", 1)[0]
    command = [sys.executable, "-c", example, redis.url(PRODUCER), PRODUCER, "demo", job_id]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_every_role_does_its_work_and_is_refused_nothing(redis, tmp_path):
    at = f"@{redis.socket}"
    gateway = start(
        tmp_path / "gateway", "gateway", f"unix://{GATEWAY}{at}", "--port=0", f"--producers=default,{PRODUCER}"
    )
    worker = start(tmp_path / "worker", "worker", f"unix://{WORKER}{at}", "--device=cpu")
    other = None
    try:
        url = gateway.found(r"ready (http://\S+)")
        alone = text_of(ask(url, "/v1/completions", BODY))
        assert "data: [DONE]" in ask(url, "/v1/completions", {**BODY, "stream": True})
        assert len(ask(url, "/v1/completions", {**BODY, "n": 3, "seed": 1, "temperature": 1})["choices"]) == 3
        assert produce(redis, "Tell me a story.").returncode == 0
        kept = ask(url, "/v1/completions", {**BODY, "background": True}, **{"Idempotency-Key": "once"})
        again = ask(url, "/v1/completions", {**BODY, "background": True}, **{"Idempotency-Key": "once"})
        assert kept["id"] == again["id"]
        assert ask(url, f"/v1/requests/{kept['id']}")["id"] == kept["id"]
        long = ask(url, "/v1/completions", {**BODY, "background": True, "max_tokens": 1500, "ignore_eos": True})
        ask(url, f"/v1/requests/{long['id']}", method="DELETE")
        assert "vllm:" in urllib.request.urlopen(f"{url}/metrics", timeout=10).read().decode()
        survivor = ask(url, "/v1/completions", {**BODY, "background": True, "max_tokens": 200, "ignore_eos": True})
        other = start(tmp_path / "other", "worker", f"unix://{WORKER}{at}", "--device=cpu")
        assert worker.end(signal.SIGKILL) == -signal.SIGKILL
        while (state := ask(url, f"/v1/requests/{survivor['id']}"))["status"] in ("queued", "in_progress"):
            assert other.process.poll() is None, other.output
            time.sleep(0.2)
        assert (state["status"], state["response"]["usage"]["completion_tokens"]) == ("completed", 200)
        assert text_of(ask(url, "/v1/completions", BODY)) == alone
        assert (other.end(), gateway.end()) == (0, 0), gateway.output + other.output
        assert redis.refusals() == []
    finally:
        for part in (gateway, worker, other):
            if part is not None:
                part.close()


@pytest.mark.skipif(OPENSSL is None, reason="openssl is not installed, which makes the certificates")
def test_the_way_to_redis_may_be_tls(redis, tmp_path):
    made, other = make_certificates(tmp_path / "tls"), make_certificates(tmp_path / "strangers")
    with tls_in_front_of(redis.socket, made) as port:
        trusted = f"rediss://{GATEWAY}@localhost:{port}?ssl_ca_certs={made.authority}"
        gateway = start(tmp_path / "gateway", "gateway", trusted, "--port=0")
        worker = start(
            tmp_path / "worker",
            "worker",
            f"rediss://{WORKER}@localhost:{port}?ssl_ca_certs={made.authority}",
            "--device=cpu",
        )
        try:
            assert text_of(ask(gateway.found(r"ready (http://\S+)"), "/v1/completions", BODY))
            assert (worker.end(), gateway.end()) == (0, 0)
        finally:
            gateway.close()
            worker.close()
        for number, url in enumerate(
            (
                f"rediss://{GATEWAY}@localhost:{port}?ssl_ca_certs={other.authority}",
                f"rediss://{GATEWAY}@localhost:{port}",
                f"rediss://{GATEWAY}@127.0.0.2:{port}?ssl_ca_certs={made.authority}",
            )
        ):
            refused = subprocess.run(
                [sys.executable, "-m", "service.cli.entry", "gateway", f"--redis-url={url}", "--port=0"],
                cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False,
            )  # fmt: skip
            assert refused.returncode == 2, number
            assert "CERTIFICATE_VERIFY_FAILED" in refused.stderr
            assert "Traceback" not in refused.stderr
