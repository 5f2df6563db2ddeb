"""Any headers, queries and paths on every route: always one well-formed answer, never a 500 nor a silent end."""

import asyncio
import json
from base64 import b64encode
from urllib.parse import quote_from_bytes

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.support.gateway import MODEL, open_gateway
from tests.support.num_examples import num_examples
from tests.support.raw_http import RawClient

EXAMPLES = settings(max_examples=num_examples(300), deadline=None, suppress_health_check=list(HealthCheck))
ANSWER_WITHIN_S = 10.0
KEY = "first-key"
GOOD = {"Authorization": f"Bearer {KEY}", "Host": "localhost"}
RESPONSE = {"model": MODEL, "input": "hi", "max_output_tokens": 4}

ERROR_FIELDS = {"message", "type", "param", "code"}
METHODS = ["GET", "POST", "DELETE", "HEAD", "PUT", "OPTIONS", "PATCH", "get", "X-Y", "CONNECT", "TRACE"]
JSON_BODY = json.dumps({"model": MODEL, "prompt": "the", "max_tokens": 2, "stream": True, "background": True}).encode()
CHAT_BODY = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}).encode()
FORM_BODY = (
    b"--b\r\nContent-Disposition: form-data; name=purpose\r\n\r\nbatch\r\n"
    b'--b\r\nContent-Disposition: form-data; name=file; filename="a"\r\n\r\n{}\r\n--b--\r\n'
)

NUMBERS = [
    b"0", b"1", b"-1", b"+1", b" 1", b"1 ", b"1_0", b"1.5", b"1e3", b"0x10", b"NaN", b"", b"\xd9\xa1", b"\xc2\xb2",
    b"00000000199999", b"000000001" + b"0" * 60, b"9" * 20, b"9" * 5000, b"0" * 5000 + b"1", b"10001", b"999999999",
]  # fmt: skip
PLACES = [
    b"http://[", b"//]", b"http://user:p@ss@[", b"http://[1:2:3:4:5:6:7:8:9]", b"http://[::1", b"http://]", b"[", b"]",
    b"http://[v1.x]", b"http://[v1]:80", b"http://[::1%25eth0]", b"http://[::ffff:1.2.3.4.5]", b"http://a:b:c",
    b"http://localhost:99999999", b"http://localhost:-1", b"http://\xe2\x84\x80/", b"http://\xef\xbc\x8f", b"null",
    b"", b"http://\xff\xfe", b"http://a\tb", b"://", b"http:", b"http://[1::2::3]", b"[::1]:80", b"localhost",
    b"127.0.0.1:8", b"1.2.3.4.5", b"[fe80::1%lo]", b"[:::]", b"999.999.999.999", b"xn--a", b"xn--\xff", b"..",
    b"a" * 300,
]  # fmt: skip
TYPES = [
    b"application/json", b"application/json;", b"application/json; charset=", b"application/json; charset=utf-16",
    b"application/json; charset=nonsense", b"multipart/form-data; boundary=b", b"multipart/form-data", b"/", b";",
    b"a", b"multipart/form-data; boundary=", b"multipart/form-data; boundary=" + b"b" * 200, b"text/plain; =",
    b"a/b/c; d=e", b'multipart/form-data; boundary="b', b"multipart/form-data; boundary*=utf-8''b",
    b"multipart/form-data; boundary*=b", b"multipart/form-data; boundary*0=b; boundary*1=c",
    b"multipart/form-data; boundary=\xff", b"multipart/mixed; boundary=b",
    b"multipart/form-data; boundary*=nonsense''%ff", b"application/json; charset*=nonsense''%ff",
    b"application/json\x01",
]  # fmt: skip
CRAFTED = {
    b"Host": PLACES,
    b"Origin": PLACES,
    b"Referer": PLACES,
    b"Forwarded": [b"for=[", b"for=;host=[;proto=", b"for=" + b"," * 999, b'for="[::1"', b"host=" + b"\xff"],
    b"X-Forwarded-For": PLACES,
    b"X-Forwarded-Host": PLACES,
    b"X-Forwarded-Proto": [b"[", b""],
    b"Last-Event-ID": NUMBERS,
    b"Content-Length": NUMBERS,
    b"Content-Type": TYPES,
    b"Content-Encoding": [b"identity", b"gzip", b"deflate", b"br", b"zstd", b"gzip, gzip", b"", b"\xff"],
    b"Transfer-Encoding": [b"chunked", b"chunked, chunked", b"gzip, chunked", b"identity", b"", b"\xff"],
    b"Authorization": [
        b"", b"Bearer", b"Bearer ", b"Bearer \xff", b"Basic", b"Basic =", b"Basic \xff", b"Basic YQ", b"Basic Og==",
        b"Bearer " + KEY.encode(), b"bearer  first-key", b"Digest username=[", b" ", b"Basic " + b"A" * 4000,
        b"Basic \xc3\xa9", b"Negotiate", b"Basic 8J+YgA==",
    ],
    b"Idempotency-Key": [b"", b"a", b"\xff", b"a" * 255, b"a" * 256, b"a b", b"\x7f", b"\xd9\xa1", b'"a"', b"{quire}"],
    b"Accept": [b"", b"*/*", b"text/event-stream", b"TEXT/EVENT-STREAM;q=x", b";;q=", b"," * 500, b"\xff"],
    b"Accept-Encoding": [b"gzip", b"\xff", b"gzip;q=nan"],
    b"traceparent": [
        b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01", b"00-" + b"0" * 32 + b"-" + b"b" * 16 + b"-01", b"ff--", b"",
        b"00-\xd9\xa1", b"01-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01-" + b"x" * 500, b"-",
    ],
    b"tracestate": [b"", b"=", b"," * 40, b"\xff"],
    b"Range": [b"bytes=", b"bytes=-", b"bytes=9-1", b"bytes=" + b"9" * 400 + b"-", b"x", b"\xff"],
    b"If-Modified-Since": [b"", b"x", b"Thu, 99 Jan 99999 00:00:00 GMT", b"Thu, 01 Jan 0000 25:61:61 GMT", b"\xff"],
    b"If-Unmodified-Since": [b"Thu, 01 Jan 1970 00:00:00 GMT", b"Fri, 31 Dec 9999 23:59:60 GMT"],
    b"If-None-Match": [b"*", b'W/"', b'"\xff"', b","],
    b"If-Match": [b"*", b'W/"', b","],
    b"If-Range": [b"x", b""],
    b"Cookie": [b"a=b", b"=", b";;;", b'a="\\', b"\xff=\xfe", b"a" * 4000, b"$Version=x"],
    b"Expect": [b"100-continue", b"100-CONTINUE", b"nonsense", b"", b"\xff"],
    b"Connection": [b"close", b"keep-alive", b"upgrade", b"Host", b"", b"\xff"],
    b"Upgrade": [b"websocket", b"h2c", b"", b"\xff"],
    b"Sec-WebSocket-Key": [b"x", b""],
    b"X-Request-Id": [b"", b"\xff", b"a" * 300],
    b"X-HTTP-Method-Override": [b"DELETE", b"["],
    b"": [b"x"],
    b"X Y": [b"z"],
    b"\xff": [b"x"],
}  # fmt: skip
QUERIES = ["limit", "after", "order", "starting_after", "stream", "include", "include[]", "purpose", "", "model", "x"]
QUERY_VALUES = [*NUMBERS, b"true", b"false", b"asc", b"desc", b"batch", b"[", b"\xff", b"\x00", b"%", b"a" * 999]
IDS = [
    b"a", b"..", b"\x00", b"\xff", b"%", b"{x}", b"[", b"", b"cmpl-1", b"req_" + b"0" * 32, b"a" * 900, b"a/b", b"\n",
    b"file-" + b"0" * 32, b"batch_" + b"0" * 32, b"resp_" + b"0" * 32, b"file-" + b"\xc3\xa9" * 16, b"\xed\xa0\x80",
]  # fmt: skip

header_names = st.sampled_from(sorted(CRAFTED))
random_values = st.binary(max_size=40) | st.text(max_size=20).map(lambda text: text.encode("utf-8", "surrogatepass"))


@st.composite
def headers(draw):
    """A few header lines; what would end a line is left out."""
    lines = []
    for _ in range(draw(st.integers(0, 4))):
        name = draw(header_names)
        value = draw(st.sampled_from(CRAFTED[name]) | random_values)
        lines.append(name + b": " + value.replace(b"\r", b"").replace(b"\n", b""))
    return lines


@st.composite
def queries(draw):
    values = st.sampled_from(QUERY_VALUES) | random_values
    pairs = draw(st.lists(st.tuples(st.sampled_from(QUERIES), values), max_size=3))
    raw = draw(st.booleans())
    parts = [
        name.encode() + b"=" + (_visible(value) if raw else quote_from_bytes(value).encode()) for name, value in pairs
    ]
    return b"?" + b"&".join(parts) if parts else b""


def _visible(value):
    """Without what ends a request line or the word in it."""
    return bytes(byte for byte in value if byte > 32)


class FuzzedGateway:
    """A gateway that random requests are sent to, each on a connection of its own."""

    def __init__(self, runner, gateway, routes):
        self._runner = runner
        self._gateway = gateway
        self.routes = routes
        self.response = b""

    def fault(self, request):
        """Return what is wrong with the answer to these bytes; None for one whole answer below 500 in the right
        form."""
        return self._runner.run(self._fault(request))

    async def _fault(self, request):
        client = await RawClient.connect(self._gateway.url)
        try:
            await client.send(request)
            async with asyncio.timeout(ANSWER_WITHIN_S):
                status, body = await client.whole_response(has_body=not request.startswith(b"HEAD"))
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError, ValueError) as error:
            return f"no answer: {error!r}"
        finally:
            await client.close()
        is_worded = status < 400 or not body or _has_error_fields(json.loads(body))
        return None if status < 500 and is_worded else f"{status}: {body[:200]!r}"

    def get(self, path):
        return self._runner.run(self._gateway.get(path, headers=GOOD))

    def post(self, path, body):
        return self._runner.run(self._gateway.post(path, body, headers=GOOD))


def _has_error_fields(answer):
    """Return whether it is an error of OpenAI's API, or Anthropic's."""
    is_anthropic = set(answer) == {"type", "error", "request_id"}
    return set(answer["error"]) == ({"type", "message"} if is_anthropic else ERROR_FIELDS)


@pytest.fixture(scope="module", params=["open", "locked"])
def gateway(request, model_folder):
    with asyncio.Runner() as runner:
        locked = {"api_key": (KEY,), "allowed_hosts": ("localhost", "*.good.example")}
        opened = open_gateway(model_folder, read_timeout=0.5, **(locked if request.param == "locked" else {}))
        gateway = FuzzedGateway(runner, runner.run(opened.__aenter__()), [])
        gateway.routes += [
            route for route in gateway.get("/")[1]["routes"] if route not in ("/readyz", "/health", "/ping")
        ]
        gateway.response = b"/v1/responses/" + gateway.post("/v1/responses", RESPONSE)[1]["id"].encode()
        yield gateway
        assert gateway.get("/v1/models")[0] == 200
        runner.run(opened.__aexit__(None, None, None))


LOCKED = pytest.mark.parametrize("gateway", ["locked"], indirect=True)
"""Gateway with keys, for errors that do not depend on them."""


@st.composite
def requests(draw):
    """A function of the routes that gives the bytes: routes are known only when the gateway is open."""
    method, which = draw(st.sampled_from(METHODS)), draw(st.integers(0, 999))
    fill = draw(st.sampled_from(IDS) | random_values)
    query, lines, host = draw(queries()), draw(headers()), draw(st.booleans())
    body = draw(st.sampled_from([b"", JSON_BODY, CHAT_BODY, FORM_BODY]) | st.binary(max_size=60))
    kind = b"multipart/form-data; boundary=b" if body == FORM_BODY else b"application/json"
    has_key, has_type, quoted = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())

    def build(routes):
        path = routes[which % len(routes)]
        named = (quote_from_bytes(fill, safe="").encode() if quoted else _visible(fill)) or b"x"
        target = b"/".join(named if part.startswith("{") else part.encode() for part in path.split("/")) + query
        head = [method.encode() + b" " + target + b" HTTP/1.1"]
        head += [b"Host: localhost"] if host else []
        head += [b"Authorization: Bearer " + KEY.encode()] if has_key else []
        head += [b"Content-Type: " + kind] if has_type else []
        has_length = any(line.startswith((b"Content-Length", b"Transfer-Encoding")) for line in lines)
        head += [] if has_length else [b"Content-Length: %d" % len(body)]
        return b"\r\n".join([*head, *lines, b"", body])

    return build


@EXAMPLES
@given(requests())
@example(lambda routes: request_of(b"POST", b"/v1/completions", [b"Origin: http://["], JSON_BODY))
@example(lambda routes: request_of(b"GET", b"/v1/batches?limit=000000001" + b"0" * 5000, []))
@example(lambda routes: request_of(b"GET", b"/livez", [b"Expect: \xff"]))
def test_any_headers_and_queries(gateway, build):
    assert gateway.fault(build(gateway.routes)) is None


def request_of(method, target, lines, body=b""):
    """A well-formed request but for these header lines; each takes the place of the usual one of its name."""
    names = {line.partition(b":")[0].lower() for line in lines}
    password = b64encode(b"me:" + KEY.encode())  # with a bearer's key no Origin would be looked at
    usual = [b"Host: localhost", b"Authorization: Basic " + password, b"Content-Type: application/json"]
    usual += [b"Content-Length: %d" % len(body)] if b"transfer-encoding" not in names else []
    kept = [line for line in usual if line.partition(b":")[0].lower() not in names]
    return b"\r\n".join([method + b" " + target + b" HTTP/1.1", *kept, *lines, b"", body])


CRAFTED_LINES = [name + b": " + value for name, values in CRAFTED.items() for value in values]


@pytest.mark.parametrize(
    ("method", "target", "body"),
    [
        (b"GET", b"/v1/models", b""),
        (b"HEAD", b"/v1/requests/cmpl-x", b""),
        (b"POST", b"/v1/completions", JSON_BODY),
        (b"POST", b"/v1/chat/completions", CHAT_BODY),
        (b"POST", b"/v1/files", FORM_BODY),
    ],
)
def test_every_crafted_header(gateway, method, target, body):
    faults = []
    for line in CRAFTED_LINES:
        faults.append((line, gateway.fault(request_of(method, target, [line], body))))
    assert [(line, fault) for line, fault in faults if fault] == []


@LOCKED
@pytest.mark.parametrize("name", QUERIES)
def test_every_crafted_query(gateway, name):
    faults = []
    for target in (
        b"/v1/files",
        b"/v1/batches",
        gateway.response,
        gateway.response + b"/input_items",
        b"/v1/requests/x",
    ):
        for value in QUERY_VALUES:
            for text in (quote_from_bytes(value).encode(), _visible(value)):
                path = target + b"?" + name.encode() + b"=" + text
                faults.append((path, gateway.fault(request_of(b"GET", path, []))))
    assert [(path, fault) for path, fault in faults if fault] == []


@LOCKED
def test_every_crafted_id_on_every_route(gateway):
    faults = []
    for route in gateway.routes:
        for method in (b"GET", b"POST", b"DELETE") if "{" in route else (b"GET",):
            for text in {form for each in IDS for form in (quote_from_bytes(each, safe="").encode(), _visible(each))}:
                path = b"/".join(text if part.startswith("{") else part.encode() for part in route.split("/"))
                faults.append((path, gateway.fault(request_of(method, path, []))))
    assert [(path, fault) for path, fault in faults if fault] == []


PART_LINES = [
    b"Content-Disposition: form-data; name=file; filename*=nonsense''%ff",
    b"Content-Disposition: form-data; name=file; filename*0=a; filename*1*=utf-8''%", b"Content-Disposition: x",
    b"Content-Disposition: form-data; name=\xff; filename=\xff", b"Content-Disposition: form-data; name*=x''file",
    b'Content-Disposition: form-data; name="file', b"Content-Disposition: form-data; filename=" + b"a" * 5000,
    b"Content-Disposition: form-data; name=file; filename=\x00", b"Content-Disposition;;;;=", b"Content-Disposition:",
    b"Content-Type: multipart/mixed; boundary=c", b"Content-Type: multipart/mixed", b"Content-Type: ;;", b": x", b"x",
    b"Content-Length: 5", b"Content-Length: -5", b"Content-Length: x", b"Content-Length: " + b"9" * 5000,
    b"Content-Transfer-Encoding: base64", b"Content-Transfer-Encoding: \xff", b"Content-Encoding: gzip", b"\xff: \xff",
    b"Content-Encoding: nonsense", b"Content-Transfer-Encoding: quoted-printable", b"X: y\r\n folded",
    b"A: " + b"a" * 9000,
]  # fmt: skip
KIND = b"Content-Type: multipart/form-data; boundary=b"


@LOCKED
@pytest.mark.parametrize("ending", [b"--b--\r\n", b"--b--", b"", b"--b\r\n", b"--c--\r\n", b"\r\n"])
def test_every_crafted_form(gateway, ending):
    faults = []
    purpose = b"--b\r\nContent-Disposition: form-data; name=purpose\r\n\r\nbatch\r\n"
    for line in PART_LINES:
        for before in ([], [b"Content-Disposition: form-data; name=file"]):
            body = purpose + b"--b\r\n" + b"\r\n".join([*before, line, b"", b"{}", ending])
            faults.append((line, gateway.fault(request_of(b"POST", b"/v1/files", [KIND], body))))
    assert [(line, fault) for line, fault in faults if fault] == []


@LOCKED
@EXAMPLES
@given(
    st.lists(st.sampled_from([*PART_LINES, b"--b", b"--b--", b"--c", b"", b"{}"]) | st.binary(max_size=30), max_size=8)
)
def test_any_form(gateway, lines):
    assert gateway.fault(request_of(b"POST", b"/v1/files", [KIND], b"\r\n".join([b"--b", *lines]))) is None
