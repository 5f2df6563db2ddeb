"""The gateway's README.md names every field of every body, every route, and the values without effect."""

from __future__ import annotations

import json
import re

import msgspec
import pytest

from service.gateway.anthropic.messages_body import IDLE_MESSAGES_FIELDS, MessagesBody
from service.gateway.batches.batches import BatchBody
from service.gateway.openai.request_bodies import (
    IDLE_CHAT_FIELDS,
    IDLE_COMPLETION_FIELDS,
    IDLE_EMBEDDING_FIELDS,
    IDLE_POOLING_FIELDS,
    IDLE_RESPONSE_FIELDS,
    ChatBody,
    CompletionBody,
    EmbeddingBody,
    GenerationBody,
    PoolingBody,
)
from service.gateway.openai.responses.body import ResponseBody
from service.gateway.openapi.document import openapi_document
from service.gateway.routes.tokenization import DetokenizeBody, TokenizeBody
from tests.support.source_tree import ROOT

TEXT = (ROOT / "service" / "gateway" / "README.md").read_text()
Rows = list[list[str]]


def tables(section: str) -> list[Rows]:
    """The rows of each table of a section, less their headers."""
    body = re.search(rf"^## {section}\n(.*?)(?=^##+ |\Z)", TEXT, re.M | re.S)[1]
    found: list[Rows] = []
    for block in re.findall(r"(?:^\|.*\n)+", body, re.M):
        rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in block.strip().split("\n")]
        found.append(rows[2:])
    return found


def names(rows: Rows) -> list[str]:
    return [name for row in rows for name in re.findall(r"`([a-z_]+)`", row[0])]


def fields(*bodies: type[msgspec.Struct]) -> set[str]:
    return {name for body in bodies for name in body.__struct_fields__}


def exactly(listed: list[str], wanted: set[str]) -> None:
    assert sorted(listed) == sorted(wanted)


def test_completions_and_chats():
    both, completions, chats, idle = tables("Completions and chats")
    exactly(names(both), fields(GenerationBody))
    exactly(names(completions), fields(CompletionBody) - fields(GenerationBody))
    exactly(names(chats), fields(ChatBody) - fields(GenerationBody))
    exactly(names(idle), {*IDLE_COMPLETION_FIELDS, *IDLE_CHAT_FIELDS})


def test_other_bodies():
    working, idle = tables("Responses")
    exactly(names(working), fields(ResponseBody))
    exactly(names(idle), set(IDLE_RESPONSE_FIELDS))
    working, idle = tables("Messages")
    exactly(names(working), fields(MessagesBody))
    exactly(names(idle), set(IDLE_MESSAGES_FIELDS))
    (embeddings,) = tables("Embeddings")
    exactly(names(embeddings), fields(EmbeddingBody) | set(IDLE_EMBEDDING_FIELDS))
    (pooling,) = tables("Pooling")
    exactly(
        names(pooling),
        (fields(PoolingBody) - fields(EmbeddingBody)) | (IDLE_POOLING_FIELDS.keys() - IDLE_EMBEDDING_FIELDS),
    )
    (batches,) = tables("Batches")
    exactly(names(batches), fields(BatchBody))
    (texts,) = tables("Tokenize and detokenize")
    exactly(names(texts), fields(TokenizeBody, DetokenizeBody))


@pytest.mark.parametrize(
    ("section", "column", "idle", "working"),
    [
        ("Completions and chats", 1, IDLE_COMPLETION_FIELDS, CompletionBody),
        ("Completions and chats", 2, IDLE_CHAT_FIELDS, ChatBody),
        ("Responses", 1, IDLE_RESPONSE_FIELDS, ResponseBody),
        ("Messages", 1, IDLE_MESSAGES_FIELDS, MessagesBody),
    ],
)
def test_the_values_that_ask_for_nothing(section, column, idle, working):
    for row in tables(section)[-1]:
        for name in names([row]):
            values = re.findall(r"`([^`]+)`", row[column])
            if row[column] == "unknown":
                assert name not in idle
                assert name not in fields(working)
            elif name in idle:
                assert [json.loads(value) for value in values] == list(idle[name]), name
            else:
                assert name in fields(working), f"{name} is neither idle nor known"


def test_every_route_is_listed():
    table = re.search(r"(?:^\|.*\n)+", TEXT, re.M)[0]
    received = set(re.findall(r"(?<=[ `])(/[a-z0-9_/{}.]*)", table)) - {"/", "/ui", "/metrics", "/openapi.json"}
    tails = {f"{path.rsplit('/', 1)[0]}" for path in received}
    for path in openapi_document("1", "m", keys_required=True)["paths"]:
        stem, _, tail = path.rpartition("/")
        assert path in received or (stem in received and f".../{tail}" in table), (path, tails)
