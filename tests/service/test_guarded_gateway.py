"""The door of a real gateway process against those who are slow, many, unknown or in the clear."""

import asyncio
import base64
import json
import os
import ssl
import time
import urllib.error
import urllib.request
import warnings
from contextlib import AsyncExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from service.gateway.http.auth import line_of
from tests.support.certificates import OPENSSL, make_certificates
from tests.support.raw_http import RawClient
from tests.support.served import Served

READ_TIMEOUT_S = 1.0
WRITE_TIMEOUT_S = 1.0
MAX_PER_CLIENT = 40
KEY = "sk-quire-first"
WORDY = {
    "model": "demo", "messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 450,
    "ignore_eos": True, "stream": True, "logprobs": True, "top_logprobs": 20,
}  # fmt: skip
"""More than half a megabyte: more than the buffers of two kernels and a server hold together."""


@pytest.fixture(scope="module")
def key_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "api-keys"
    path.write_text(line_of(KEY, "alice", None, None) + "\n")
    return path


@pytest.fixture(scope="module")
def served(tmp_path_factory, key_file):
    running = Served(
        tmp_path_factory.mktemp("data"),
        f"--read-timeout={READ_TIMEOUT_S}",
        f"--write-timeout={WRITE_TIMEOUT_S}",
        f"--max-connections-per-client={MAX_PER_CLIENT}",
        f"--api-key-file={key_file}",
    )
    yield running
    running.terminate()


def status_of(url, key=None, body=None, context=None):
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=20, context=context) as response:
            return response.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code if "error" in json.loads(error.read()) else 0


async def drip(client, data, every_s):
    """Send one byte at a time until the server hangs up. Return when it did."""
    ended = asyncio.create_task(client.at_eof())
    for number in range(len(data)):
        try:
            await client.send(data[number : number + 1])
        except ConnectionError:
            break
        if (await asyncio.wait({ended}, timeout=every_s))[0]:
            break
    assert await ended
    return time.monotonic()


async def test_headers_that_drip_are_cut_off(served):
    async with AsyncExitStack() as open_clients:
        started_s = time.monotonic()  # the server counts from a connection on
        clients = [await RawClient.connect(served.url) for _ in range(20)]
        for client in clients:
            open_clients.push_async_callback(client.close)
        head = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"a" * 4000
        drips = [asyncio.create_task(drip(client, head, 0.1)) for client in clients]
        assert await asyncio.to_thread(status_of, f"{served.url}/v1/models", KEY) == 200
        for ended_s in await asyncio.gather(*drips):
            assert READ_TIMEOUT_S * 0.9 < ended_s - started_s < READ_TIMEOUT_S + 9


async def test_a_body_that_drips_gets_408(served):
    client = await RawClient.connect(served.url)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    started_s = time.monotonic()
    await client.send(f"{head}Authorization: Bearer {KEY}\r\nContent-Length: 4000\r\n\r\n".encode())

    async def keep_dripping():
        while True:
            await client.send(b" ")
            await asyncio.sleep(0.1)

    dripping = asyncio.create_task(keep_dripping())
    status, headers, body = await client.response()
    elapsed_s = time.monotonic() - started_s
    dripping.cancel()
    await asyncio.gather(dripping, return_exceptions=True)
    assert (status, headers["connection"]) == (408, "close")
    assert json.loads(body)["error"]["code"] == "request_timeout"
    assert READ_TIMEOUT_S * 0.9 < elapsed_s < READ_TIMEOUT_S + 9
    await client.close()


async def test_a_reader_that_stops_is_cut_off_and_its_job_ends(served):
    client = await RawClient.connect(served.url, receive_bytes=4096)
    body = json.dumps(WORDY).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
    await client.send(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    await client.read_until(b"data: ")
    client.stop_reading()
    async with asyncio.timeout(60):
        while 'quire:requests_ended_total{reason="cancelled"} 0.0' in await asyncio.to_thread(metrics, served):
            await asyncio.sleep(0.2)
    await client.close()
    assert status_of(f"{served.url}/v1/models", KEY) == 200


def metrics(served):
    request = urllib.request.Request(f"{served.url}/metrics", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=10) as response:
        return response.read().decode()


async def test_one_address_cannot_take_all_connections(served):
    held = [await RawClient.connect(served.url) for _ in range(MAX_PER_CLIENT)]
    late = await RawClient.connect(served.url)
    status, headers, body = await late.response()
    assert (status, headers["retry-after"]) == (429, "2")
    assert json.loads(body)["error"]["code"] == "too_many_connections"
    assert await late.at_eof()
    for client in (late, *held):
        await client.close()
    async with asyncio.timeout(10):
        while await asyncio.to_thread(status_of, f"{served.url}/livez") != 200:
            await asyncio.sleep(0.05)


def test_keys_come_and_go_while_it_serves(served, key_file):
    models = f"{served.url}/v1/models"
    assert [status_of(models, key) for key in (None, "wrong", KEY)] == [401, 401, 200]
    assert [status_of(f"{served.url}{path}") for path in ("/livez", "/readyz", "/health", "/metrics", "/nowhere")] == [
        200, 200, 200, 401, 401,
    ]  # fmt: skip
    fresh = key_file.with_suffix(".new")
    fresh.write_text(line_of("second", "bob", None, None) + "\n")
    os.replace(fresh, key_file)
    give_up = time.monotonic() + 10
    while status_of(models, KEY) != 401:
        assert time.monotonic() < give_up, served.output
        time.sleep(0.1)
    assert status_of(models, "second") == 200
    key_file.write_text(line_of(KEY, "alice", None, None) + "\n")
    while status_of(models, KEY) != 200:
        assert time.monotonic() < give_up, served.output
        time.sleep(0.1)


@pytest.mark.skipif(OPENSSL is None, reason="openssl is not installed, which makes the certificates")
def test_https(tmp_path):
    made = make_certificates(tmp_path / "tls")
    running = Served(
        tmp_path / "data", "--host=localhost", f"--ssl-certfile={made.certificate}", f"--ssl-keyfile={made.key}"
    )
    try:
        assert running.url.startswith("https://localhost:")
        context = ssl.create_default_context(cafile=str(made.authority))
        body = {"model": "demo", "prompt": "Once", "max_tokens": 4}
        assert status_of(f"{running.url}/v1/completions", body=body, context=context) == 200
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            status_of(f"{running.url}/livez", context=ssl.create_default_context())
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.load_verify_locations(made.authority)
        old.set_ciphers("DEFAULT@SECLEVEL=0")
        with warnings.catch_warnings(action="ignore"):
            old.maximum_version = ssl.TLSVersion.TLSv1_1
            old.minimum_version = ssl.TLSVersion.TLSv1
        with pytest.raises(urllib.error.URLError):
            status_of(f"{running.url}/livez", context=old)
    finally:
        running.terminate()


@pytest.mark.skipif(OPENSSL is None, reason="openssl is not installed, which makes the certificates")
def test_a_certificate_that_cannot_be_used_is_one_line(tmp_path):
    made = make_certificates(tmp_path / "tls")
    other = make_certificates(tmp_path / "other")
    for flags, word in [
        ([f"--ssl-certfile={tmp_path / 'none'}"], "No such file"),
        ([f"--ssl-certfile={made.certificate}", f"--ssl-keyfile={other.key}"], "MISMATCH"),
        ([f"--ssl-keyfile={made.key}"], "--ssl-certfile"),
    ]:
        with pytest.raises(AssertionError) as failure:
            Served(tmp_path / "data", *flags).kill()
        assert word in str(failure.value)
        assert "Traceback" not in str(failure.value)


async def test_malformed_headers_queries_and_forms_are_400_and_print_nothing(served):
    form = "multipart/form-data; boundary=b"
    part = "--b\r\nContent-Disposition: form-data; {}\r\n\r\n{{}}\r\n--b--\r\n"
    cases = [
        ("POST", "/v1/completions", {"Origin": "http://["}, "{}"),
        ("POST", "/v1/completions", {"Origin": "http://user:p@ss@["}, "{}"),
        ("POST", "/v1/completions", {"Origin": "http://[1:2:3:4:5:6:7:8:9]"}, "{}"),
        ("GET", "/v1/batches?limit=000000001" + "0" * 5000, {}, ""),
        ("GET", "/v1/batches?limit=00000000199999", {}, ""),
        ("POST", "/v1/files", {"Content-Type": form}, part.format("name=file; filename*=nonsense''%ff")),
        ("POST", "/v1/files", {"Content-Type": form}, part.format("=\x1b[2J;;;")),
    ]
    num_lines = len(served.lines)
    password = base64.b64encode(f"me:{KEY}".encode()).decode()
    for method, path, headers, body in cases:
        sent = {"Host": "localhost", "Authorization": f"Basic {password}", "Content-Length": str(len(body)), **headers}
        client = await RawClient.connect(served.url)
        head = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
        await client.send(f"{method} {path} HTTP/1.1\r\n{head}\r\n{body}".encode())
        status, answer = await client.whole_response()
        assert (status, json.loads(answer)["error"]["type"]) == (400, "invalid_request_error"), (path, headers)
        await client.close()
    assert status_of(f"{served.url}/v1/models", KEY) == 200
    assert served.lines[num_lines:] == []


HOLDING = {"01": "established", "04": "fin_wait1", "08": "close_wait", "09": "last_ack", "0B": "closing"}
"""States of a connection for which a kernel holds data, or a process a socket."""


def connections_of(url):
    """The states of the server's connections that are not over."""
    port = urlsplit(url).port
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [HOLDING[row[3]] for row in rows if int(row[1].partition(":")[2], 16) == port and row[3] in HOLDING]


PLAIN = {name: value for name, value in WORDY.items() if "logprobs" not in name}
STREAMS = [{**WORDY, "max_tokens": 5}, {**WORDY, "max_tokens": 60}, WORDY, PLAIN]
WHOLE = [{**body, "stream": False} for body in STREAMS]
UNREAD = [*STREAMS, *WHOLE, b"/v1/models", b"/nowhere", b"/livez\r\nExpect: x"]


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="only Linux lists its connections")
async def test_nothing_is_held_for_clients_that_never_read(served):
    """A client that reads nothing loses its connection after the write timeout: for an answer longer or shorter than
    all buffers, for many in a row, and if the server has closed it already."""
    auth = f"Authorization: Bearer {KEY}\r\n"
    async with AsyncExitStack() as clients:
        for asked in UNREAD:
            client = await RawClient.connect(served.url, receive_bytes=4096)
            clients.push_async_callback(client.reset)
            client.stop_reading()
            if isinstance(asked, bytes):
                path, _, more = asked.decode().partition("\r\n")
                client.send_later(f"GET {path} HTTP/1.1\r\nHost: a\r\n{auth}{more}\r\n\r\n".encode() * 5000)
                continue
            body = json.dumps(asked)
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n{auth}Content-Type: application/json\r\n"
            await client.send(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        assert len(connections_of(served.url)) >= len(UNREAD)
        give_up_s = time.monotonic() + 90
        while held := connections_of(served.url):
            assert time.monotonic() < give_up_s, held
            await asyncio.sleep(0.2)
    assert status_of(f"{served.url}/v1/models", KEY) == 200
