"""Probes, metrics, models and tokens."""

import asyncio

import pytest

from service.queue.interface import QUEUE_LANES, UNBOUNDED, QueueUnavailable
from tests.support.demo_engine import DEMO
from tests.support.gateway import MAX_POSITION, MODEL, QuickQueue, open_gateway
from tests.support.wire import make_job

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("path", ["/readyz", "/health"])
async def test_ready_only_with_a_ready_worker_and_a_queue(model_folder, path, monkeypatch):
    monkeypatch.setattr("service.gateway.core.fleet.MAX_AGE_S", -1)

    class PartialQueue(QuickQueue):
        away = False

        async def workers(self):
            if self.away:
                raise QueueUnavailable("secret address")
            return await super().workers()

    async with open_gateway(model_folder, PartialQueue()) as gateway:
        assert await gateway.get(path) == (200, {"status": "ok", "missing": [], "num_ready_workers": 1})
        gateway.worker.ready = False
        await gateway.worker.announce()
        status, body = await gateway.get(path)
        assert (status, body["missing"]) == (503, ["no ready worker serves this model"])
        gateway.queue.away = True
        status, body = await gateway.get(path)
        assert (status, body["missing"]) == (503, ["the queue is not available"])
        assert (await gateway.get("/livez"))[0] == 200
        async with gateway.http.get(gateway.url + "/metrics") as response:
            assert response.status == 200
            text = await response.text()
        for name in ("quire:queue_lane_depth", "quire:queue_oldest_wait_seconds"):
            for lane in QUEUE_LANES:
                assert f'{name}{{lane="{lane}"}} NaN' in text
        assert "quire:leases NaN" in text
        assert "quire:queue_depth NaN" in text
        assert (await gateway.get("/v1/models"))[0] == 200


async def test_a_worker_of_another_model_does_not_count(model_folder):
    async with open_gateway(model_folder, served_model_name="other") as gateway:
        assert (await gateway.get("/readyz"))[0] == 503


async def test_metrics(gateway):
    gateway.worker.stats = {"num_running": 7.0}
    await gateway.worker.announce()
    await gateway.post(CHAT, {"model": MODEL, "messages": MESSAGES})
    await gateway.get("/v1/models/../../secret")
    async with gateway.http.get(gateway.url + "/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = await response.text()
    assert 'vllm:num_requests_running{engine="scripted",model_name="scripted"} 7.0' in text
    assert 'quire:http_responses_total{route="/v1/chat/completions",status="200"} 1.0' in text
    assert 'vllm:request_success_total{engine="gateway",finished_reason="stop",model_name="scripted"} 1.0' in text
    assert "secret" not in text


async def test_metrics_of_the_queue(model_folder, monkeypatch):
    monkeypatch.setattr("service.gateway.core.fleet.MAX_AGE_S", -1)
    async with open_gateway(model_folder) as gateway:
        gateway.worker.paused = True
        while gateway.worker.is_fetching:
            await asyncio.sleep(0.01)
        data = gateway.queue.data
        data.submit(make_job("A", submitted_at_s=0.0), UNBOUNDED)
        data.submit(make_job("B", is_batch=True), UNBOUNDED)

        async def seen():
            async with gateway.http.get(gateway.url + "/metrics") as response:
                lines = (await response.text()).splitlines()
            return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}

        first, second = await seen(), await seen()
        for lane, depth in (("normal", 1), ("batch", 1), ("returned", 0), ("suspect", 0)):
            assert first[f'quire:queue_lane_depth{{lane="{lane}"}}'] == depth
            waits_s = [one[f'quire:queue_oldest_wait_seconds{{lane="{lane}"}}'] for one in (first, second)]
            assert (0 <= waits_s[0] < waits_s[1] < 60) if depth else waits_s == [0, 0]
        assert first["quire:leases"] == 1
        assert first["quire:queue_depth"] == 2


async def test_models(gateway):
    status, body = await gateway.get("/v1/models")
    assert status == 200
    (card,) = body["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == (MODEL, "model", MAX_POSITION)
    assert await gateway.get(f"/v1/models/{MODEL}") == (200, card)
    status, body = await gateway.get("/v1/models/..%2f..%2fetc%2fpasswd")
    assert (status, body["error"]["code"]) == (404, "model_not_found")


async def test_welcome(gateway):
    status, body = await gateway.get("/")
    assert (status, body["model"]) == (200, MODEL)


async def test_tokens_there_and_back(gateway):
    ids = gateway.model.tokenizer.encode("the and <|im_end|> é")
    status, body = await gateway.post("/tokenize", {"model": MODEL, "prompt": "the and <|im_end|> é"})
    assert (status, body) == (
        200,
        {"count": len(ids), "tokens": ids, "token_strs": None, "max_model_len": MAX_POSITION},
    )
    assert gateway.model.eos_token_ids[0] not in ids
    assert await gateway.post("/detokenize", {"tokens": ids}) == (200, {"prompt": "the and <|im_end|> é"})
    assert await gateway.post("/detokenize", {"tokens": []}) == (200, {"prompt": ""})
    _, body = await gateway.post("/tokenize", {"prompt": "the and", "return_token_strs": True})
    assert body["token_strs"] == ["the", " ", "and"]


async def test_tokens_without_special_tokens_around_a_prompt():
    async with open_gateway(DEMO) as gateway:
        _, whole = await gateway.post("/tokenize", {"prompt": "Once upon"})
        _, bare = await gateway.post("/tokenize", {"prompt": "Once upon", "add_special_tokens": False})
        assert whole["tokens"] == [gateway.model.tokenizer.special_id("<|begin|>"), *bare["tokens"]]
        assert await gateway.post("/tokenize", {"prompt": "Once upon", "add_special_tokens": True}) == (200, whole)


async def test_a_template_that_the_client_rendered():
    async with open_gateway(DEMO) as gateway:
        _, chat = await gateway.post("/tokenize", {"messages": MESSAGES})
        rendered = gateway.model.tokenizer.decode(chat["tokens"], skip_special_tokens=False)
        parsed = {"prompt": rendered, "parse_special": True}
        assert (await gateway.post("/tokenize", parsed))[1]["tokens"] == chat["tokens"]
        assert (await gateway.post("/tokenize", {"prompt": rendered}))[1]["count"] > chat["count"]
        asked = {"model": MODEL, "return_token_ids": True, **parsed}
        _, answer = await gateway.post(COMPLETIONS, asked)
        assert answer["choices"][0]["prompt_token_ids"] == chat["tokens"]
        for skips in (True, False):
            echo = {"echo": True, "logprobs": 0, "skip_special_tokens": skips}
            choice = (await gateway.post(COMPLETIONS, asked | echo))[1]["choices"][0]
            shown = rendered if not skips else gateway.model.tokenizer.decode(chat["tokens"])
            assert choice["text"].startswith(shown)
            offset = choice["logprobs"]["text_offset"][len(chat["tokens"])]
            assert offset == len(shown)


async def test_tokens_of_messages_match_the_job(gateway):
    _, body = await gateway.post("/tokenize", {"messages": MESSAGES})
    _, answer = await gateway.post(CHAT, {"model": MODEL, "messages": MESSAGES})
    assert body["count"] == answer["usage"]["prompt_tokens"]
    _, shorter = await gateway.post("/tokenize", {"messages": MESSAGES, "add_generation_prompt": False})
    assert shorter["count"] < body["count"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": MESSAGES, "parse_special": True}, "parse_special"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("/tokenize", {"prompt": "a", "x": 1}, "x"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [2**40]}, "tokens"),
    ],
)
async def test_token_routes_refuse_by_name(gateway, path, body, param):
    status, answer = await gateway.post(path, body)
    assert (status, answer["error"]["param"]) == (400, param)


async def test_token_routes_know_the_model(gateway):
    assert (await gateway.post("/tokenize", {"model": "x", "prompt": "a"}))[0] == 404
    assert (await gateway.post("/detokenize", {"model": "x", "tokens": []}))[0] == 404
