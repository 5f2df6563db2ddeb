"""Traces from a client's header to the worker's steps, with OpenTelemetry's exporter in memory; and without it."""

import asyncio
import logging
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import aiohttp
import msgpack
import pytest

from service.config.settings import Settings
from service.errors import EndReason, StartupError
from service.gateway.core.served_model import ServedModel
from service.gateway.process import serving
from service.observability import tracing
from service.observability.logs import _OneLine, add_log_context, log_context
from service.observability.tracing import NO_TRACING, open_tracing, read_traceparent, trace_id
from service.queue.messages import Cancel
from service.worker.job_counts import ClaimTimes
from service.worker.spans import JobSpans
from tests.fakes.queue.worker import MemoryWorkerQueue
from tests.support.gateway import QuickQueue, write_model
from tests.support.queue_pair import QueuePair
from tests.support.source_tree import ROOT
from tests.support.wire import make_job
from tests.support.worker_harness import WorkerHarness

otel = pytest.importorskip("service.observability.otel", reason="the extra otel is not installed")
export = pytest.importorskip("opentelemetry.sdk.trace.export")
sdk = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")

THEIRS = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = THEIRS[:-1] + "0"


class Spans:
    """A tracing that keeps its spans."""

    def __init__(self):
        self.kept = sdk.InMemorySpanExporter()
        provider = otel.TracerProvider()
        provider.add_span_processor(export.SimpleSpanProcessor(self.kept))
        self.tracing = otel.OtelTracing(provider)

    def by_name(self):
        return {span.name: span for span in self.kept.get_finished_spans()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@asynccontextmanager
async def service(folder, traced, **options):
    """A gateway and a worker over one queue; both make spans with `traced`."""
    settings = Settings(model=folder, served_model_name="m", port=0, drain_timeout=0.2)
    queue = QuickQueue()
    async with (
        WorkerHarness(QueuePair(queue, MemoryWorkerQueue(queue.data)), tracing=traced, **options) as worker,
        serving(settings, ServedModel.read(settings), queue, traced) as url,
        aiohttp.ClientSession(url) as http,
    ):
        yield worker, queue, http


async def complete(http, headers=None, **body):
    asked = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0.5, "ignore_eos": True, **body}
    async with http.post("/v1/completions", json=asked, headers=headers) as response:
        return response.status, await response.json()


async def test_a_request_is_one_trace_from_the_clients_header_to_the_last_token(folder):
    spans = Spans()
    async with service(folder, spans.tracing) as (_, _, http):
        before_s = time.time()
        status, answer = await complete(http, {"traceparent": THEIRS})
        assert status == 200
    made = spans.by_name()
    assert set(made) == {
        "POST /v1/completions", "admission", "text_completion m", "queue", "prefill", "decode",
    }  # fmt: skip
    assert {f"{span.context.trace_id:032x}" for span in made.values()} == {trace_id(THEIRS)}
    served, generation = made["POST /v1/completions"], made["text_completion m"]
    assert f"{served.parent.span_id:016x}" == THEIRS[36:52]
    assert made["admission"].parent.span_id == generation.parent.span_id == served.context.span_id
    assert {made[name].parent.span_id for name in ("queue", "prefill", "decode")} == {generation.context.span_id}
    assert dict(served.attributes) == {
        "http.request.method": "POST", "http.route": "/v1/completions", "url.scheme": "http",
        "http.response.status_code": 200,
    }  # fmt: skip
    asked = dict(generation.attributes)
    assert -(1 << 63) <= asked.pop("gen_ai.request.seed") < 1 << 63, "drawn, for the client gave none"
    assert asked == {
        "gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "quire",
        "gen_ai.request.model": "m", "gen_ai.response.model": "m", "gen_ai.response.id": answer["id"][len("cmpl-") :],
        "gen_ai.request.max_tokens": 4, "gen_ai.request.temperature": 0.5,
        "gen_ai.response.finish_reasons": ("length",), "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 4, "gen_ai.usage.cache_read.input_tokens": 0,
        "quire.tenant": "anonymous", "quire.stream": False,
    }  # fmt: skip
    assert made["prefill"].attributes["gen_ai.usage.input_tokens"] == 3
    assert made["decode"].attributes["gen_ai.usage.output_tokens"] == 4
    assert made["decode"].attributes["quire.end"] == "length"
    queue_span, prefill, decode = (made[name] for name in ("queue", "prefill", "decode"))
    assert before_s - 1 < queue_span.start_time / 1e9
    assert queue_span.end_time == prefill.start_time <= prefill.end_time == decode.start_time <= decode.end_time
    assert all(span.status.is_ok or span.status.status_code.name == "UNSET" for span in made.values())


async def test_what_begins_here_is_a_trace_of_its_own_each_time(folder):
    spans = Spans()
    async with service(folder, spans.tracing) as (_, _, http):
        for header in ({}, {"traceparent": "00-nonsense"}):
            assert (await complete(http, header))[0] == 200
    ids = [span.context.trace_id for span in spans.kept.get_finished_spans()]
    assert len(set(ids)) == 2
    assert len(ids) == 12


async def test_a_client_that_does_not_sample_has_no_spans(folder):
    spans = Spans()
    async with service(folder, spans.tracing) as (_, _, http):
        assert (await complete(http, {"traceparent": UNSAMPLED}))[0] == 200
    assert spans.kept.get_finished_spans() == ()


async def test_refusals_say_why(folder):
    spans = Spans()
    async with service(folder, spans.tracing) as (_, _, http):
        assert (await complete(http, model="unknown"))[0] == 404
        assert (await complete(http, prompt=[]))[0] == 400
    made = spans.kept.get_finished_spans()
    assert [span.name for span in made] == ["admission", "POST /v1/completions", "POST /v1/completions"]
    assert made[0].attributes["error.type"] == "model_not_found"
    assert [span.attributes["http.response.status_code"] for span in made[1:]] == [404, 400]


async def test_a_job_that_is_cancelled_fails_by_name(folder):
    spans = Spans()
    async with service(folder, spans.tracing, step_s=0.01) as (_, queue, http):
        asked = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 400, "stream": True, "ignore_eos": True}
        async with http.post("/v1/completions", json=asked) as response:
            await response.content.readline()
            await queue.cancel(Cancel(job_id=response.headers["X-Request-Id"], reason=EndReason.CANCELLED))
            await response.read()
    made = spans.by_name()
    assert made["decode"].attributes["error.type"] == made["text_completion m"].attributes["error.type"] == "cancelled"


async def test_a_producers_trace_goes_through_the_queue_door(folder):
    spans = Spans()
    async with service(folder, spans.tracing) as (_, queue, _):
        job = {
            "v": 1, "id": "a", "endpoint": "/v1/completions", "traceparent": THEIRS,
            "body": {"model": "m", "prompt": [1, 2], "max_tokens": 2},
        }  # fmt: skip
        await queue.produce("default", msgpack.packb(job))
        async with asyncio.timeout(10):
            while "text_completion m" not in spans.by_name():
                await asyncio.sleep(0.005)
    made = spans.by_name()
    assert {f"{span.context.trace_id:032x}" for span in made.values()} == {trace_id(THEIRS)}
    assert f"{made['text_completion m'].parent.span_id:016x}" == THEIRS[36:52]


async def test_without_tracing_a_clients_trace_still_reaches_the_log_and_the_job(folder, caplog):
    caplog.set_level(logging.DEBUG, "quire")
    caplog.handler.setFormatter(_OneLine())
    async with service(folder, NO_TRACING) as (_, _, http):
        status, answer = await complete(http, {"traceparent": THEIRS})
        assert status == 200
    request_id = answer["id"].removeprefix("cmpl-")
    lines = [line for line in caplog.text.split("\n") if request_id in line]
    logged = [word for line in lines for word in ("admitted", "claimed", "closed", "answered") if f" {word} " in line]
    assert sorted(logged) == ["admitted", "answered", "claimed", "closed"]
    assert all(f"trace={trace_id(THEIRS)}" in line for line in lines if "closed" not in line)


async def test_a_second_attempt_has_no_wait_in_the_queue():
    spans = Spans()
    times = ClaimTimes(attempt=2, queued_s=5.0)
    job_spans = JobSpans(tracing=spans.tracing, job=make_job(traceparent=THEIRS), times=times)
    times.request.started_s = times.request.first_token_s = time.time()
    job_spans.end(None)
    made = spans.by_name()
    assert set(made) == {"prefill", "decode"}
    assert made["decode"].attributes["quire.end"] == "handed_on"
    assert made["decode"].attributes["quire.attempt"] == 2


@pytest.mark.parametrize(
    ("header", "read"),
    [
        (THEIRS, THEIRS),
        ("01" + THEIRS[2:] + "-more", THEIRS),
        ("01" + THEIRS[2:], THEIRS),
        (None, None),
        ("", None),
        (THEIRS + "-more", None),
        ("ff" + THEIRS[2:], None),
        (THEIRS.upper(), None),
        ("00-" + "0" * 32 + THEIRS[35:], None),
        (THEIRS[:36] + "0" * 16 + THEIRS[52:], None),
        (THEIRS[:-1], None),
        (THEIRS + "\n", None),
    ],
)
def test_traceparents(header, read):
    assert read_traceparent(header) == read


ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}


@pytest.mark.parametrize(
    "environ", [{}, {**ENDPOINT, "OTEL_SDK_DISABLED": "true"}, {**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"}]
)
def test_spans_are_off_by_default(environ):
    assert open_tracing("gateway", environ) is NO_TRACING


def test_an_endpoint_without_the_extra_is_logged(monkeypatch, caplog):
    monkeypatch.setattr(tracing, "find_spec", lambda name: None)
    assert open_tracing("gateway", ENDPOINT) is NO_TRACING
    assert "quire[otel]" in caplog.text


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "http/protobuf"),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "localhost:4318", "'localhost:4318' is not supported"),
        ("OTEL_BSP_SCHEDULE_DELAY", "-5", "schedule_delay_millis must be positive"),
    ],
)
def test_wrong_variables_are_refused(name, value, reason, monkeypatch):
    monkeypatch.setenv(name, value)  # the SDK reads its own
    with pytest.raises(StartupError, match=f"^OTEL_.*: .*{reason}"):
        open_tracing("gateway", {**ENDPOINT, name: value})


def test_no_exporter_is_loaded_by_default():
    """The Redis client looks for the SDK by itself."""
    program = (
        "import sys; from service.cli.parser import make_parser; make_parser()\n"
        "sys.exit(bool({'service.observability.otel', 'opentelemetry.exporter'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")


def test_spans_reach_a_collector(monkeypatch):
    """One POST of protobuf, with the name of the part in it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        for name in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
            monkeypatch.delenv(name, raising=False)
        environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{server.getsockname()[1]}"}
        monkeypatch.setenv(*next(iter(environ.items())))
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
        made = open_tracing("gateway", environ)
        made.start_span("something", THEIRS, {"of": "note", "nothing": None}).end()
        received = _receive_in_thread(server)
        made.close()
        head, body = received()
    assert re.match(rb"POST /v1/traces HTTP/1.1\r\n", head)
    assert b"quire-gateway" in body
    assert b"something" in body
    assert b"nothing" not in body


def _receive_in_thread(server):
    """Answers one POST; call what it returns for (head, body)."""

    def serve():
        connection, _ = server.accept()
        with connection:
            connection.settimeout(10)
            data = b""
            while b"\r\n\r\n" not in data:
                data += connection.recv(65536)
            head, _, body = data.partition(b"\r\n\r\n")
            length = int(re.search(rb"(?i)content-length: (\d+)", head)[1])
            while len(body) < length:
                body += connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        return head, body

    pool = ThreadPoolExecutor(1)
    task = pool.submit(serve)
    pool.shutdown(wait=False)
    return lambda: task.result(timeout=10)


def test_log_lines_say_what_the_task_is_about():
    record = logging.LogRecord("quire.x", logging.INFO, "", 0, "printed line=2", None, None)
    with log_context(trace="abc", line=9, nothing=None):
        add_log_context(request="R")
        assert _OneLine().format(record).endswith("quire.x printed line=2 trace=abc request=R")
    add_log_context(request="S")
    assert _OneLine().format(record).endswith("quire.x printed line=2")
