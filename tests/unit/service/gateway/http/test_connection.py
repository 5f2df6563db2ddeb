"""Malformed, long, slow or excessive HTTP is refused with OpenAI's error JSON."""

import asyncio
import json

import pytest

from tests.support.gateway import MODEL, open_gateway
from tests.support.raw_http import RawClient, is_error, raw

CHAT = "/v1/chat/completions"


BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    "head",
    [
        b"GET /livez HTTP/1.1\r\nHost: a/livez?\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: a b\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: \r\n\r\n",
        b"GET /livez HTTP/1.1\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET http://evil.example/livez HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: a:99999999\r\n\r\n",
        b"GET /livez HTTP/9.9\r\nHost: a\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET\r\n\r\n",
        b"\r\n\r\n\x00\r\n\r\n",
    ],
)
async def test_malformed_http(gateway, head):
    status, headers, answer = await raw(gateway, head)
    assert status == 400
    assert headers["content-type"].startswith("application/json")
    assert is_error(answer)
    assert (await gateway.get("/livez"))[0] == 200


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /livez HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 9000 + b"\r\n\r\n", 431),
        (b"GET /livez HTTP/1.1\r\nHost: a\r\n" + b"x" * 9000 + b": x\r\n\r\n", 431),
        (b"GET /livez HTTP/1.1\r\nHost: a\r\n" + b"X: x\r\n" * 200 + b"\r\n", 431),
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 414),
    ],
)
async def test_too_much_before_the_body(gateway, head, status):
    answered, _, answer = await raw(gateway, head)
    assert (answered, is_error(answer)) == (status, True)
    assert (await gateway.get("/livez"))[0] == 200


async def test_own_absolute_form(gateway):
    assert (await raw(gateway, b"GET http://a:80/livez HTTP/1.1\r\nHost: a:80\r\n\r\n"))[0] == 200
    assert (await raw(gateway, b"GET /livez HTTP/1.0\r\n\r\n"))[0] == 200
    assert (await raw(gateway, b"GET /livez HTTP/1.1\r\nHost: [::1]:8000\r\n\r\n"))[0] == 200


async def test_no_content_type(gateway):
    request = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}"
    status, _, answer = await raw(gateway, request)
    assert (status, is_error(answer)) == (415, True)


async def test_body_too_large(model_folder):
    async with open_gateway(model_folder, max_body_bytes=2000) as gateway:
        body = {**BODY, "user": "x" * 3000}
        status, answer = await gateway.post(CHAT, body)
        assert (status, answer["error"]["code"]) == (413, "body_too_large")
        head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        status, _, answer = await raw(gateway, head + b"Content-Length: 99999999999999\r\n\r\n")
        assert (status, is_error(answer)) == (413, True)
        chunks = b"5\r\n     \r\n" * 1000
        status, _, answer = await raw(gateway, head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks)
        assert (status, is_error(answer)) == (413, True)


async def test_broken_chunks(gateway):
    head = b"POST /tokenize HTTP/1.1\r\nHost: [::1]\r\nContent-Type: application/json\r\n"
    head += b"Transfer-Encoding: chunked\r\n\r\n"
    status, _, answer = await raw(gateway, head + b"2\r\n{}\r\nzz\r\n")
    assert (status, is_error(answer)) == (400, True)


async def test_slow_body(model_folder):
    async with open_gateway(model_folder, read_timeout=0.1) as gateway:
        head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += b"Content-Length: 9\r\n\r\n{"
        status, headers, answer = await raw(gateway, head)
        assert (status, is_error(answer)) == (408, True)
        assert headers["connection"] == "close"


async def test_slow_headers(model_folder):
    async with open_gateway(model_folder, read_timeout=0.2) as gateway:
        client = await RawClient.connect(gateway.url)
        await client.send(b"GET /livez HTTP/1.1\r\nHost:")
        assert await client.at_eof()
        await client.close()


async def test_expectation(gateway):
    head = b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 2\r\n"
    status, _, answer = await raw(gateway, head + b"Expect: coffee\r\n\r\n{}")
    assert (status, is_error(answer)) == (417, True)


async def test_two_requests_on_one_connection(gateway):
    client = await RawClient.connect(gateway.url)
    await client.post(CHAT, BODY)
    await client.post("/tokenize", {"prompt": "the"})
    assert (await client.response())[0] == 200
    assert (await client.response())[0] == 200
    await client.close()


async def test_connections_from_one_address_are_counted(model_folder):
    async with open_gateway(model_folder, max_connections_per_client=2) as gateway:
        assert await _turned_away(gateway, num_held=2) == 429
    async with open_gateway(model_folder, max_connections=2) as gateway:
        assert await _turned_away(gateway, num_held=2) == 503


async def _turned_away(gateway, num_held):
    """Return the status of another connection; after one has left there is room again."""
    held = [await RawClient.connect(gateway.url) for _ in range(num_held)]
    for client in held:
        await client.send(b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n")
        assert (await client.response())[0] == 200
    late = await RawClient.connect(gateway.url)
    status, headers, body = await late.response()
    assert (headers["connection"], is_error(json.loads(body))) == ("close", True)
    assert int(headers["retry-after"]) > 0
    assert await late.at_eof()
    await late.close()
    await held.pop().close()
    async with asyncio.timeout(5):
        while (await gateway.get("/livez"))[0] != 200:
            await asyncio.sleep(0.01)
    for client in held:
        await client.close()
    return status
