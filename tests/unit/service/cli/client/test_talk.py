"""The verbs that speak to a running service: what they print, and what they say where it fails."""

from __future__ import annotations

import asyncio
import io
import os
import pty
import signal
import sys
from pathlib import Path

import pytest

from service.cli.main import main
from service.errors import EndReason
from tests.fakes.scripted_worker import Script
from tests.support.certificates import OPENSSL, make_certificates
from tests.support.gateway import open_gateway, write_model

SOON_S = 20.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch):
    monkeypatch.delenv("QUIRE_URL", raising=False)
    monkeypatch.delenv("QUIRE_API_KEY", raising=False)


async def quire(*argv: str) -> int:
    return await asyncio.to_thread(main, list(argv))


async def test_chat_prints_the_answer(folder, capsys):
    async with open_gateway(folder) as gateway:
        assert await quire("chat", "--url", gateway.url, "--system", "Be brief.", "--seed", "3", "Hi") == 0
        text = gateway.model.tokenizer.decode(_ids(gateway.worker.jobs[0].prompt), skip_special_tokens=False)
    assert capsys.readouterr().out == "Hello world.\n"
    assert text.index("Be brief.") < text.index("Hi")
    assert gateway.worker.jobs[0].sampling.seed == 3


async def test_a_pipe_is_a_message_and_a_prompt(folder, capsys, monkeypatch):
    async with open_gateway(folder) as gateway:
        monkeypatch.setattr("sys.stdin", io.StringIO("the and"))
        assert await quire("complete", "--url", gateway.url, "--max-tokens", "2") == 0
        assert capsys.readouterr().out.startswith("the and")
        monkeypatch.setattr("sys.stdin", io.StringIO("Hi"))
        assert await quire("chat", "--url", gateway.url) == 0
        assert capsys.readouterr().out == "Hello world.\n"


async def test_a_refusal_is_one_line(folder, capsys):
    async with open_gateway(folder, api_key=("right",)) as gateway:
        assert await quire("chat", "--url", gateway.url, "--api-key", "right", "Hi") == 0
        for flags, complaint in (
            (["--api-key", "wrong", "Hi"], "(--api-key, or $QUIRE_API_KEY)"),
            (["--api-key", "right", "--max-tokens", "0", "Hi"], "max_tokens"),
            (["--api-key", "right", "--model", "other", "Hi"], "model"),
        ):
            assert await quire("chat", "--url", gateway.url, *flags) == 1
            received = capsys.readouterr().err
            assert received.startswith("quire chat: ")
            assert complaint in received
            assert received.count("\n") == 1


async def test_an_answer_that_fails_behind_its_beginning_fails(folder, capsys):
    async with open_gateway(folder) as gateway:
        gateway.worker.script = lambda job: Script([gateway.model.tokenizer.encode("Hello")], EndReason.INTERNAL)
        assert await quire("chat", "--url", gateway.url, "Hi") == 1
    printed = capsys.readouterr()
    assert printed.out == "Hello"
    assert "engine failed" in printed.err


@pytest.mark.parametrize(
    ("url", "complaint", "status"),
    [
        ("http://127.0.0.1:9", "cannot be reached", 1),
        ("foo", "is not supported (an http or https URL)", 2),
        ("localhost:8000", "is not supported (an http or https URL)", 2),
    ],
)
def test_where_nothing_is_found(url, complaint, status, capsys):
    for verb in (["chat", "Hi"], ["complete", "Hi"], ["top", "--once"]):
        assert main([verb[0], "--url", url, *verb[1:]]) == status
        assert complaint in capsys.readouterr().err


@pytest.mark.skipif(OPENSSL is None, reason="needs openssl")
async def test_a_tls_error_is_printed(folder, tmp_path, capsys):
    files = make_certificates(tmp_path)
    secured = {"ssl_certfile": files.certificate, "ssl_keyfile": files.key}
    async with open_gateway(folder) as plain, open_gateway(folder, **secured) as gateway:
        for url, complaint in (
            (gateway.url, "unable to get local issuer certificate (SSL_CERT_FILE names the certificates to trust)"),
            (plain.url.replace("http:", "https:"), "no TLS: "),
        ):
            assert await quire("chat", "--url", url, "Hi") == 1
            assert complaint in capsys.readouterr().err


async def test_ctrl_c_where_a_line_is_awaited_leaves_the_chat(folder):
    ours, theirs = pty.openpty()
    argv = (sys.executable, "-m", "service.cli.entry", "chat", "--url")
    async with open_gateway(folder) as gateway:
        quire = await asyncio.create_subprocess_exec(*argv, gateway.url, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        os.write(ours, b"Hi\n")
        received = b""
        while received.count(b"> ") < 2:
            received += await asyncio.to_thread(os.read, ours, 4096)
        assert b"Hello world." in received
        while Path(f"/proc/{quire.pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
            await asyncio.sleep(0.01)  # it has yet to begin to wait
        quire.send_signal(signal.SIGINT)
        try:
            assert await asyncio.wait_for(quire.wait(), SOON_S) == 0
        finally:
            os.close(ours)


async def test_top_draws_a_live_service(folder, capsys):
    async with open_gateway(folder) as gateway:
        gateway.worker.stats = {"steps_total": 5.0, "num_blocks_free": 8.0, "num_blocks_used": 8.0}
        await gateway.worker.announce()
        assert await quire("top", "--url", gateway.url, "--once", "--every", "0.1") == 0
    received = capsys.readouterr().out
    assert "requests  0 open" in received
    assert "worker    scripted" in received
    assert "8 used" in received


def test_top_refuses_a_span_that_is_none(capsys):
    assert main(["top", "--every", "0"]) == 2
    assert "--every" in capsys.readouterr().err


def _ids(packed: bytes) -> list[int]:
    return list(memoryview(packed).cast("I"))
