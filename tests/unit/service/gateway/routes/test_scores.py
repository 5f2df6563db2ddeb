"""`/score` and `/rerank`: products of embeddings, sorted or in pairs, or refused."""

from __future__ import annotations

import msgspec
import pytest

from service.errors import EndReason
from service.gateway.openapi import answers
from service.queue.codec import unpack_ids
from tests.fakes.scripted_worker import Script
from tests.support.gateway import open_gateway


def vector_of(job) -> Script:
    """Return a vector that grows with the prompt."""
    return Script([[5]], EndReason.LENGTH, embedding=(float(len(unpack_ids(job.prompt))), 0.5))


async def test_scores_and_rankings(model_folder):
    async with open_gateway(model_folder, enable_embeddings=True) as gateway:
        gateway.worker.script = vector_of
        lengths = {text: len(gateway.model.tokenizer.encode(text)) for text in ("a", "the and", "the and the and")}
        short, middle, long = lengths
        scores = {text: lengths[middle] * length + 0.25 for text, length in lengths.items()}
        for right in (short, [short, long]):
            for path in ("/score", "/v1/score"):
                _, answer = await gateway.post(path, {"text_1": middle, "text_2": right})
                wanted = [scores[text] for text in ([right] if isinstance(right, str) else right)]
                assert [one["score"] for one in answer["data"]] == wanted
                msgspec.convert(answer, answers.ScoreList, strict=True)
        _, answer = await gateway.post("/score", {"text_1": [middle, short], "text_2": [short, middle]})
        assert [one["score"] for one in answer["data"]] == [scores[short]] * 2
        for names in (("data_1", "data_2"), ("queries", "documents"), ("queries", "items")):
            _, answer = await gateway.post("/score", dict(zip(names, (middle, short), strict=True)))
            assert [one["score"] for one in answer["data"]] == [scores[short]]
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            _, answer = await gateway.post(
                path, {"query": middle, "documents": [short, {"text": long}, middle], "top_n": 2}
            )
            assert [(one["index"], one["document"]["text"]) for one in answer["results"]] == [(1, long), (2, middle)]
            msgspec.convert(answer, answers.Ranking, strict=True)
        for path, body, param in (
            ("/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_1"),
            ("/score", {"text_1": "a", "text_2": []}, "text_2"),
            ("/score", {"text_1": "a"}, "text_2"),
            ("/score", {}, "text_1"),
            ("/score", {"queries": "a"}, "documents"),
            ("/score", {"queries": "a", "items": []}, "items"),
            ("/score", {"text_1": "a", "text_2": "b", "data_1": "c"}, "data_1"),
            ("/rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents"),
            ("/rerank", {"query": "a", "documents": ["b"] * 1024}, "documents"),
            ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
            ("/rerank", {"query": "a", "documents": [1]}, "documents"),
        ):
            status, answer = await gateway.post(path, body)
            assert status == 400
            assert answer["error"]["param"].startswith(param)


@pytest.mark.parametrize("path", ["/score", "/rerank"])
async def test_they_need_embeddings(model_folder, path):
    async with open_gateway(model_folder) as gateway:
        status, _ = await gateway.post(path, {})
        assert status == 404
