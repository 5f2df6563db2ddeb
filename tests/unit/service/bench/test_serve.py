"""The open loop: its statistics, its client against a gateway with a scripted worker, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from service.bench.load_client import Answer, Task, _note, body_of
from service.bench.report import Spread, script_environment
from service.bench.serve import Plan, summarize
from service.bench.trace import TracedRequest
from service.cli.main import main
from tests.fakes.scripted_worker import Script
from tests.support.gateway import open_gateway, write_model

TRACE = [{"prompt_tokens": 5 + i, "output_tokens": 3 + i, "arrival": 0.5 * i} for i in range(6)]
NUM_TOKENS = sum(each["output_tokens"] for each in TRACE)


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "small.json"
    path.write_text(json.dumps({"requests": TRACE}))
    return path


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def plan(num_requests: int, **more) -> Plan:
    options = {"slo_ttft_ms": 100.0, "slo_gap_ms": 20.0, "max_seconds": 60.0, "num_clients": 1, "vocab_size": 9, **more}
    requests = [TracedRequest(1, 1, float(number)) for number in range(num_requests)]
    return Plan(url="http://host", api_key=None, rate=2.0, requests=requests, **options)


async def bench(*flags) -> int:
    """Run `quire bench serve` in a thread next to the loop that serves it."""
    return await asyncio.to_thread(main, ["bench", "serve", *map(str, flags)])


@asynccontextmanager
async def answering(handler):
    """A service that answers every completion with `handler`."""
    app = web.Application()
    app.router.add_post("/v1/completions", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def test_latencies_rates_and_goodput():
    fast = Answer(sent_s=0.001, chunks_s=[0.05, 0.06, 0.08], end_s=0.1, num_tokens=3)
    slow_start = Answer(sent_s=0.001, chunks_s=[0.2, 0.21], end_s=0.3, num_tokens=2)
    slow_gaps = Answer(sent_s=0.001, chunks_s=[0.01, 0.05], end_s=0.1, num_tokens=2)
    failed = Answer(sent_s=0.5, chunks_s=[0.01], end_s=1.0, error="HTTP 503")
    figures = summarize(plan(4), [fast, slow_start, slow_gaps, failed])
    assert figures.total_s == 2.5  # the fourth is due after 1.5 s and ends 1 s later
    assert figures.output_tokens_per_s == 7 / 2.5
    assert figures.requests_per_s == 3 / 2.5
    assert figures.goodput_per_s == 1 / 2.5
    assert figures.good_share == 0.25
    assert figures.errors == {"HTTP 503": 1}
    assert figures.num_errors == 1
    assert figures.ttft_ms.p50 == pytest.approx(50)
    assert figures.gap_ms.p50 == pytest.approx(15)  # of 10, 20, 10, 40
    assert figures.client_lag_ms.p99 == pytest.approx(500, rel=0.05)


def test_a_run_in_which_nothing_came_has_no_latencies():
    figures = summarize(plan(2), [Answer(error="x"), Answer(error="x")])
    assert figures.ttft_ms is None
    assert figures.gap_ms is None
    assert figures.errors == {"x": 2}


def test_percentiles():
    assert Spread.of(range(101)) == Spread(50, 90, 99)
    assert Spread.of([]) is None


def test_a_request_is_the_same_in_every_run():
    task = Task("http://host", None, "m", 100, 1.0, [])
    body = json.loads(body_of(task, 3, 50, 7))
    assert body == json.loads(body_of(task, 3, 50, 7))
    assert body["prompt"] != json.loads(body_of(task, 4, 50, 7))["prompt"]
    assert len(body["prompt"]) == 50
    assert 0 <= min(body["prompt"]) <= max(body["prompt"]) < 100
    assert (body["max_tokens"], body["ignore_eos"], body["stream"]) == (7, True, True)


async def test_a_run_against_a_gateway(model_folder, trace, tmp_path, capsys):
    async with open_gateway(model_folder, api_key=("secret",)) as gateway:
        gateway.worker.script = lambda job: Script([[65]] * 64, step_s=0.002)
        options = ("--rate", 20, "--clients", 2, "--vocab-size", 64, "--api-key", "secret")
        options = (*options, "--slo-ttft-ms", 60_000, "--slo-gap-ms", 60_000)
        status = await bench("--url", gateway.url, "--trace", trace, *options, "--out", tmp_path / "out.json")
        jobs = gateway.worker.jobs
    assert status == 0
    assert sorted(len(job.prompt) // 4 for job in jobs) == [each["prompt_tokens"] for each in TRACE]
    assert all(job.sampling.ignore_eos for job in jobs)
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["num_requests"] == 6
    assert record["num_errors"] == 0
    assert record["good_share"] == 1
    assert record["total_s"] >= 2.5 / 20
    assert record["output_tokens_per_s"] == pytest.approx(NUM_TOKENS / record["total_s"])
    total_ms = 1e3 * record["total_s"]
    assert 0 < record["gap_ms"]["p50"] < total_ms  # a late client may read two chunks within a step
    assert 2 <= record["ttft_ms"]["p50"] < total_ms
    assert "ttft ms" in capsys.readouterr().out


async def test_latency_counts_from_when_a_request_was_due(trace, tmp_path):
    """A stall of the service delays the requests that were due during it."""
    opened_at_s = None

    async def stalled(request: web.Request) -> web.StreamResponse:
        nonlocal opened_at_s
        loop = asyncio.get_running_loop()
        opened_at_s = opened_at_s or loop.time() + 0.6
        await asyncio.sleep(max(0, opened_at_s - loop.time()))
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'data: {"choices": [{"text": "a"}], "usage": null}\n\n')
        await response.write(b'data: {"choices": [], "usage": {"completion_tokens": 1}}\n\ndata: [DONE]\n\n')
        return response

    async with answering(stalled) as url:
        out = tmp_path / "out.json"
        asked = ("--model", "m", "--rate", 10, "--clients", 1, "--out", out)
        assert await bench("--url", url, "--trace", trace, *asked) == 0
    ttft_ms = json.loads(out.read_text())["ttft_ms"]
    assert ttft_ms["p99"] >= 590  # all are answered then, and are due between 0 and 250 ms after the first
    assert 400 <= ttft_ms["p50"] <= ttft_ms["p99"] - 20


async def test_errors_are_counted_by_name_and_the_run_is_bounded(trace, tmp_path, capsys):
    numbers = iter(range(99))

    async def failing(request: web.Request) -> web.StreamResponse:
        match next(numbers):
            case 0:
                return web.Response(status=503)
            case 1:
                return web.Response(status=302, headers={"Location": "http://127.0.0.1:1/"})
            case 2:
                return web.Response(text='data: {"error": {"message": "no"}}\n\n')
            case 3:
                return web.Response(text='data: {"choices": [{"text": "a"}]}\n\n')
            case _:
                await asyncio.sleep(60)
                raise AssertionError("the wait was too long")

    async with answering(failing) as url:
        asked = ("--model", "m", "--rate", 50, "--clients", 1, "--max-seconds", 0.7)
        status = await bench("--url", url, "--trace", trace, *asked)
    shown = capsys.readouterr().out
    assert status == 1
    for line in (
        "HTTP 503",
        "HTTP 302",
        "an error event",
        "the stream ended early",
        "unfinished at the end of the run",
    ):
        assert f"error: {line} " in shown
    assert "num errors" in shown


async def test_vllms_words_against_a_gateway(model_folder, tmp_path, capsys):
    async with open_gateway(model_folder) as gateway:
        gateway.worker.script = lambda job: Script([[65]] * 64, step_s=0.001)
        port = gateway.url.rpartition(":")[2]
        words = "--dataset-name random --random-input 8 --random-output 4 --num-prompt 12 --request-rate inf"
        more = "--max-concurrency 2 --ignore-eos --trust-remote-code --backend vllm --vocab-size 64"
        more += " --num-warmups 3 --goodput e2el:60000 --percentile-metrics ttft,e2el"
        more += f" --save-result --result-dir {tmp_path} --result-filename r.json"
        status = await bench("--port", port, *words.split(), *more.split(), "--out", tmp_path / "out.json")
        jobs = [(len(job.prompt) // 4, job.sampling.max_tokens, job.sampling.ignore_eos) for job in gateway.worker.jobs]
    assert status == 0
    assert jobs == [(8, 4, True)] * (3 + 12)
    saved = json.loads((tmp_path / "r.json").read_text())
    assert (saved["completed"], saved["total_output_tokens"], saved["model_id"]) == (12, 48, "scripted")
    shown = capsys.readouterr().out
    rows = {"Successful requests": 12, "Total input tokens": 96, "Total generated tokens": 48}
    for label, value in {**rows, "Maximum request concurrency": 2}.items():
        assert f"{label + ':':<40} {value}\n" in shown
    assert "num requests" in shown
    assert "P99 E2EL (ms):" in shown
    assert "TPOT" not in shown
    assert json.loads((tmp_path / "out.json").read_text())["rate"] == "inf"


async def test_chats_in_vllms_words(model_folder, capsys):
    """An answer's first event has only the role, and its last only the reason: neither is a token."""
    async with open_gateway(model_folder) as gateway:
        gateway.worker.script = lambda job: Script([[65]] * 64, step_s=0.001)
        words = "--backend openai-chat --endpoint /v1/chat/completions --dataset-name random --random-input-len 8"
        more = "--random-output-len 4 --num-prompts 3 --ignore-eos --vocab-size 64"
        assert await bench("--base-url", gateway.url, *words.split(), *more.split()) == 0
        assert [(job.sampling.max_tokens, job.sampling.ignore_eos) for job in gateway.worker.jobs] == [(4, True)] * 3
    assert f"{'Total generated tokens:':<40} 12\n" in capsys.readouterr().out
    answer = Answer()
    for delta in ({"role": "assistant", "content": ""}, {"content": "a"}, {}):
        _note(json.dumps({"choices": [{"delta": delta}], "usage": None}).encode(), 1.0, answer)
    assert answer.chunks_s == [1.0]


async def test_no_more_are_open_than_the_limit(tmp_path):
    num_open, most_open = 0, 0

    async def slow(request: web.Request) -> web.Response:
        nonlocal num_open, most_open
        num_open += 1
        most_open = max(most_open, num_open)
        await asyncio.sleep(0.02)
        num_open -= 1
        done = 'data: {"choices": [{"text": "a"}], "usage": {"completion_tokens": 1}}\n\ndata: [DONE]\n\n'
        return web.Response(text=done)

    async with answering(slow) as url:
        words = ("--dataset-name", "random", "--num-prompts", 20, "--max-concurrency", 3, "--model", "m")
        assert await bench("--base-url", url, *words) == 0
    assert most_open == 3


async def test_sharegpt_against_a_gateway(model_folder, tmp_path, capsys):
    path = tmp_path / "sharegpt.json"
    turns = [[{"value": text}, {"value": "a fox and a hen"}] for text in ("a long tale of a fox", "hi", "of hens " * 9)]
    path.write_text(json.dumps([{"conversations": pair} for pair in turns]))
    words = ("--dataset-name", "sharegpt", "--dataset-path", path, "--sharegpt-output-len", 5)
    async with open_gateway(model_folder) as gateway:
        gateway.worker.script = lambda job: Script([[65]] * 64, step_s=0.001)
        assert await bench("--url", gateway.url, *words, "--num-prompts", 2) == 0
        jobs = gateway.worker.jobs
        assert await bench("--url", gateway.url, *words, "--num-prompts", 3) == 2
    lengths = sorted(len(job.prompt) // 4 for job in jobs)
    assert len(lengths) == 2
    assert lengths[0] >= 4  # "hi" is too short
    assert all((job.sampling.max_tokens, job.sampling.ignore_eos) == (5, False) for job in jobs)
    assert "has 2 that fit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--trace", "x", "--dataset-name", "random"], "--trace: give it or --dataset-name"),
        (["--percentile-metrics", "ttft,x"], "--percentile-metrics: 'x' is not supported (ttft, tpot, itl, e2el)"),
        (["--metric-percentiles", "101"], "--metric-percentiles: 101 is not above 0 and at most 100"),
        (["--max-concurrency", "0"], "--max-concurrency: 0 is out of range"),
        (["--num-warmups", "-1"], "--num-warmups: -1 is out of range"),
        (["--goodput", "itl:9"], "--goodput: 'itl:9' is not of the form"),
        (["--save-result"], "--save-result, --goodput: not with --trace"),
        (["--backend", "openai-chat"], "--backend: openai-chat needs texts (--dataset-name)"),
        (["--endpoint", "/v1/chat/completions"], "--endpoint: /v1/chat/completions is not of --backend vllm"),
        (["--url", "http://host:x"], "--url: 'http://host:x'"),
        (["--url", "host:8000"], "--url: 'host:8000' is not of the form"),
        (["--url", "ftp://host"], "--url"),
        (["--url", "http://host/v1"], "--url"),
        (["--rate", "0"], "--rate: 0 is not above 0"),
        (["--rate", "nan"], "--rate"),
        (["--rate", "fast"], "--rate: 'fast' is not a number"),
        (["--clients", "65"], "--clients: 65 is out of range (1..64)"),
        (["--num-requests", "0"], "--num-requests: 0 is out of range"),
        (["--max-seconds", "-1"], "--max-seconds"),
        (["--trace", "/nowhere/trace.json"], "--trace"),
        (["--out", "/nowhere/out.json"], "--out: /nowhere: no such folder"),
        (["--plot", "figure.txt"], "--plot: figure.txt is not supported"),
    ],
)
def test_a_wrong_flag_is_one_line(trace, capsys, flags, complaint):
    rest = [text for name, text in (("--url", "http://127.0.0.1:1"), ("--rate", "1"), ("--trace", str(trace)))
            for text in (name, text) if name not in flags]  # fmt: skip
    assert main(["bench", "serve", *flags, *rest]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"quire bench: {complaint}")
    assert error.count("\n") == 1


def test_none_there_is_one_line(trace, capsys):
    assert main(["bench", "serve", "--url", "http://127.0.0.1:1", "--rate", "1", "--trace", str(trace)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("quire bench: --url: http://127.0.0.1:1 cannot be reached: ")
    assert error.count("\n") == 1


async def test_a_wrong_key_is_one_line(model_folder, trace, capsys):
    async with open_gateway(model_folder, api_key=("secret",)) as gateway:
        status = await bench("--url", gateway.url, "--trace", trace, "--rate", 1)
    assert status == 2
    assert "/v1/models answers 401" in capsys.readouterr().err


INTERRUPTED = """
import os, signal
from service.bench.load_client import _note, hand_over
signal.signal(signal.SIGALRM, lambda *_: os.write(2, b"!"))
signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
hand_over(b"x" * 1_000_000 + b"\\n", 1)
signal.setitimer(signal.ITIMER_REAL, 0)
"""


def test_a_long_answer_is_handed_over_whole():
    """Its writes are interrupted: the pipe stays full for a while."""
    command = [sys.executable, "-u", "-c", INTERRUPTED]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=script_environment(), **pipes) as client:
        assert client.stderr.read(3) == b"!!!"
        assert client.stdout.read() == b"x" * 1_000_000 + b"\n"
