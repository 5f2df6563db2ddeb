"""Batches of responses, which are stored, and of embeddings."""

from __future__ import annotations

import pytest

from service.errors import EndReason
from service.gateway.batches import progress, runner
from tests.fakes.scripted_worker import Script
from tests.support.gateway import MODEL, open_gateway
from tests.unit.service.gateway.batches.test_batches import answers, client_of, ended, jsonl, submit

RESPONSES, EMBEDDINGS = "/v1/responses", "/v1/embeddings"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(runner, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(progress, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(progress, "RETRY_S", 0.05)
    monkeypatch.setattr(runner, "POLL_INTERVAL_S", 0.1)


def line(number: int, url: str, **body) -> dict:
    return {"custom_id": f"line-{number}", "method": "POST", "url": url, "body": {"model": MODEL, **body}}


async def test_responses_are_answered_and_kept(model_folder):
    lines = [
        line(0, RESPONSES, input="Hi"),
        line(1, RESPONSES, input="Hi", store=False),
        line(2, RESPONSES, input="Hi", previous_response_id="resp_x"),
        line(3, RESPONSES, input="Hi", background=True),
        line(4, RESPONSES, input=[{"type": "function_call_output", "call_id": "a", "output": "x"}]),
    ]
    async with open_gateway(model_folder) as gateway, client_of(gateway) as client:
        batch = await ended(client, (await submit(client, jsonl(*lines), RESPONSES)).id)
        assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 3)
        first, second = [each["response"]["body"] for each in await answers(client, batch.output_file_id)]
        bad = await answers(client, batch.error_file_id)
        assert [each["response"]["status_code"] for each in bad] == [400, 400, 400]
        assert bad[0]["response"]["body"]["error"]["param"] == "previous_response_id"
        assert first["output"][0]["content"][0]["text"] == "Hello world."
        assert (first["status"], first["background"], first["store"]) == ("completed", False, True)
        kept = await client.responses.retrieve(first["id"])
        assert kept.output_text == "Hello world."
        later = await client.responses.create(model=MODEL, input="And then?", previous_response_id=first["id"])
        assert later.status == "completed"
        status, _ = await gateway.get(f"{RESPONSES}/{second['id']}")
        assert status == 404
        assert all(job.is_batch for job in gateway.worker.jobs[:2])


@pytest.mark.parametrize("is_enabled", [True, False])
async def test_embeddings(model_folder, is_enabled):
    lines = [line(0, EMBEDDINGS, input=["a", "b"]), line(1, EMBEDDINGS, input="a", encoding_format="base64")]
    async with (
        open_gateway(model_folder, enable_embeddings=is_enabled) as gateway,
        client_of(gateway) as client,
    ):
        gateway.worker.script = lambda job: Script([[5]], EndReason.LENGTH, embedding=(0.5, 0.25))
        batch = await ended(client, (await submit(client, jsonl(*lines), EMBEDDINGS)).id)
        if not is_enabled:
            received = await answers(client, batch.error_file_id)
            assert [each["response"]["body"]["error"]["code"] for each in received] == ["embeddings_disabled"] * 2
            return
        first, second = [each["response"]["body"] for each in await answers(client, batch.output_file_id)]
        assert [each["embedding"] for each in first["data"]] == [[0.5, 0.25], [0.5, 0.25]]
        assert isinstance(second["data"][0]["embedding"], str)
        assert {job.is_batch for job in gateway.worker.jobs} == {True}


async def test_a_line_for_another_endpoint_fails_the_batch(model_folder):
    async with open_gateway(model_folder) as gateway, client_of(gateway) as client:
        batch = await ended(client, (await submit(client, jsonl(line(0, EMBEDDINGS, input="a")), RESPONSES)).id)
        assert batch.status == "failed"
        assert "the url /v1/responses" in batch.errors.data[0].message
