"""Access control: keys, hosts, methods, content types. Every refusal is OpenAI's error JSON."""

import asyncio
import base64
import gzip

import pytest

from service.gateway.http.auth import line_of
from service.gateway.routes.operations import ASSETS
from tests.fakes.scripted_worker import Script
from tests.support.gateway import MODEL, open_gateway
from tests.support.raw_http import is_error, raw

CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
KEYS = ("first-key", "sécond-kéy")
OPEN_ROUTES = frozenset({"/livez", "/readyz", "/health", "/ping"})
ROUTES = (
    ("POST", "/v1/completions"),
    ("POST", CHAT),
    ("GET", "/version"),
    ("GET", "/server_info"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("GET", "/v1/requests/{id}"),
    ("DELETE", "/v1/requests/{id}"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/metrics"),
    ("GET", "/"),
    ("GET", "/openapi.json"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/responses/input_tokens"),
    ("GET", "/v1/responses/{response_id}"),
    ("DELETE", "/v1/responses/{response_id}"),
    ("POST", "/v1/responses/{response_id}/cancel"),
    ("GET", "/v1/responses/{response_id}/input_items"),
    ("POST", "/v1/embeddings"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/pooling"),
    *(("POST", path) for path in ("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank")),
    ("POST", "/invocations"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
    ("POST", "/v1/files"),
    ("GET", "/v1/files/{file_id}"),
    ("GET", "/v1/files/{file_id}/content"),
    ("POST", "/v1/batches"),
    ("GET", "/v1/batches/{batch_id}"),
    ("POST", "/v1/batches/{batch_id}/cancel"),
    ("GET", "/ui"),
    ("GET", "/ui/"),
    *(("GET", f"/ui/{name}") for name in ("state", "sequences", "playground", "simulator", *ASSETS)),
    ("GET", "/nowhere"),
    ("DELETE", CHAT),
)


@pytest.fixture
async def locked(model_folder):
    async with open_gateway(model_folder, api_key=KEYS) as opened:
        yield opened


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_every_route_but_the_probes_needs_a_key(locked, method, path):
    async with locked.http.request(method, locked.url + path) as response:
        assert response.status == 401
        assert response.headers["WWW-Authenticate"].split()[0] == ("Basic" if path.startswith("/ui") else "Bearer")
        answer = await response.json()
        assert answer.get("type") == "error" if path.startswith("/v1/messages") else is_error(answer)


async def test_the_router_has_no_route_that_is_not_named_here(locked):
    routes = (await (await locked.http.get(locked.url + "/", headers=bearer(KEYS[0]))).json())["routes"]
    assert set(routes) == {path for _, path in ROUTES if path != "/nowhere"} | OPEN_ROUTES


@pytest.mark.parametrize("path", sorted(OPEN_ROUTES))
async def test_probes_need_no_key(locked, path):
    assert (await locked.get(path))[0] == 200


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("key", KEYS)
async def test_known_keys_enter_and_are_distinguished(locked, key):
    assert (await locked.post(CHAT, BODY, headers=bearer(key)))[0] == 200
    assert (await locked.post(CHAT, BODY, headers={"Authorization": f"bearer {key}"}))[0] == 200
    tenants = {job.tenant for job in locked.worker.jobs}
    assert len(tenants) == 1
    assert key not in tenants.pop()


@pytest.mark.parametrize(
    "header",
    [
        b"Bearer wrong",
        b"Bearer ",
        b"Bearer",
        b"first-key",
        b"Basic first-key",
        b"Bearer first-ke",
        b"Bearer first-key2",
        b"Bearer \xff\xfe",
        b"Bearer s\xe9cond-k\xe9y",
        b"Bearer first-key\r\nAuthorization: Bearer first-key",
    ],
)
async def test_wrong_keys(locked, header):
    request = b"GET /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: " + header + b"\r\n\r\n"
    status, _, answer = await raw(locked, request)
    assert status in (400, 401)
    assert is_error(answer)


async def test_key_in_utf8_bytes(locked):
    request = b"GET /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer " + KEYS[1].encode() + b"\r\n\r\n"
    assert (await raw(locked, request))[0] == 200


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "OPTIONS", "PATCH"])
async def test_wrong_method(gateway, method):
    async with gateway.http.request(method, gateway.url + CHAT) as response:
        assert response.status == 405
        assert response.headers["Allow"] == "POST"
        assert is_error(await response.json())


@pytest.mark.parametrize("path", ["/nowhere", "/v1", "/v1/audio", "//v1/models", "/v1/chat/completions/", "/%2e%2e/x"])
async def test_unknown_route(gateway, path):
    status, answer = await gateway.get(path)
    assert status == 404
    assert is_error(answer)


@pytest.mark.parametrize("path", ["/v1/completions", CHAT, "/tokenize", "/detokenize"])
async def test_body_types(gateway, path):
    for headers in (
        {"Content-Type": "text/plain"},
        {"Content-Type": "multipart/form-data"},
        {"Content-Encoding": "br"},
    ):
        status, answer = await gateway.post(path, BODY, headers=headers)
        assert status == 415
        assert is_error(answer)
    packed = gzip.compress(b" " * 10_000_000)
    assert (await gateway.post(path, packed, headers={"Content-Encoding": "gzip"}))[0] == 415


async def test_a_page_that_names_itself_is_not_for_us(gateway):
    for host, status in (("evil.example", 400), ("localhost", 200), ("127.0.0.1:80", 200), ("[::1]:80", 200)):
        assert (await gateway.get("/v1/models", headers={"Host": host}))[0] == status
        assert (await gateway.get("/livez", headers={"Host": host}))[0] == 200


async def test_any_host_is_allowed_with_a_key_unless_hosts_are_listed(locked, model_folder):
    evil = {"Host": "evil.example"}
    assert (await locked.get("/v1/models", headers={**evil, **bearer(KEYS[0])}))[0] == 200
    async with open_gateway(model_folder, api_key=KEYS, allowed_hosts=("good.example",)) as gateway:
        status, answer = await gateway.get("/v1/models", headers={**evil, **bearer(KEYS[0])})
        assert (status, answer["error"]["code"]) == (400, "unknown_host")
        good = {"Host": "good.example:8000", **bearer(KEYS[0])}
        assert (await gateway.get("/v1/models", headers=good))[0] == 200


def basic(key):
    return {"Authorization": "Basic " + base64.b64encode(f"me:{key}".encode()).decode()}


@pytest.mark.parametrize("place", ["[", "[1:2:3:4:5:6:7:8:9]", "[1.2.3.4]", "[::1]x", "user:p@ss@[", "a:65536", "a b"])
async def test_a_host_or_origin_that_names_no_place_is_malformed(gateway, place):
    status, answer = await gateway.post(CHAT, BODY, headers={"Origin": f"http://{place}"})
    assert (status, answer["error"]["code"]) == (400, "bad_origin")
    status, answer = await gateway.post(CHAT, BODY, headers={"Host": place})
    assert (status, answer["error"]["code"]) == (400, "bad_host")


@pytest.mark.parametrize(
    ("origin", "status"),
    [("http://evil.example", 403), ("null", 403), ("http://127.0.0.1:1", 403), ("file://", 403), ("own", 200)],
)
async def test_a_foreign_page_cannot_use_what_its_browser_knows(gateway, locked, origin, status):
    for opened, headers in ((gateway, {}), (locked, basic(KEYS[0]))):
        sent = {**headers, "Origin": opened.url if origin == "own" else origin}
        code, answer = await opened.post(CHAT, BODY, headers=sent)
        assert code == status
        assert status == 200 or answer["error"]["code"] == "cross_origin"
        assert (await opened.get("/v1/models", headers=sent))[0] == 200
    assert (await locked.post(CHAT, BODY, headers={**bearer(KEYS[0]), "Origin": origin}))[0] == 200


async def test_a_page_behind_a_proxy_is_ours_by_the_name_that_is_listed(model_folder):
    async with open_gateway(model_folder, allowed_hosts=("chat.example", "127.0.0.1")) as gateway:
        for origin, status in (("https://chat.example", 200), ("https://evil.example", 403)):
            assert (await gateway.post(CHAT, BODY, headers={"Origin": origin}))[0] == status


async def test_a_key_has_a_limit_of_open_requests(model_folder, tmp_path):
    path = tmp_path / "keys"
    path.write_text(line_of("one", "a", None, 2) + "\n" + line_of("two", "b", "team", None) + "\n")
    async with open_gateway(model_folder, api_key_file=path) as gateway:
        talk, gateway.worker.script = gateway.worker.script, lambda job: Script([], end=None)
        held = [asyncio.create_task(gateway.post(CHAT, BODY, headers=bearer("one"))) for _ in range(2)]
        while len(gateway.worker.jobs) < 2:
            await asyncio.sleep(0.01)
        gateway.worker.script = talk
        async with gateway.http.post(gateway.url + CHAT, json=BODY, headers=bearer("one")) as refused:
            assert (refused.status, refused.headers["Retry-After"]) == (429, "1")
            assert is_error(await refused.json())
        assert (await gateway.post(CHAT, BODY, headers=bearer("two")))[0] == 200
        held[0].cancel()
        await gateway.worker.cancelled()
        assert (await gateway.post(CHAT, BODY, headers=bearer("one")))[0] == 200
        assert {job.tenant for job in gateway.worker.jobs} == {"a", "team"}
        held[1].cancel()
        await asyncio.gather(*held, return_exceptions=True)


async def test_nothing_invites_browsers(gateway):
    async with gateway.http.get(gateway.url + "/v1/models", headers={"Origin": "http://evil.example"}) as response:
        assert not any(name.lower().startswith("access-control") for name in response.headers)
