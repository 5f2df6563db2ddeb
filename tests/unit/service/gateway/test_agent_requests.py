"""Requests in the shapes that agents send, written after their public sources: each is answered."""

from __future__ import annotations

import json

from tests.support.gateway import open_gateway, speech
from tests.support.responses import CALL, write_tool_model
from tests.support.source_tree import ROOT

FOLDER = ROOT / "tests" / "support" / "agent_requests"
AGENTS = ("claude_code", "codex_cli", "continue", "langchain", "llama_index", "open_webui")
ENDS = {"/v1/responses": "response.completed", "/v1/messages": "message_stop"}


def test_every_file_is_sent():
    assert sorted(path.stem for path in FOLDER.iterdir()) == sorted(AGENTS)


async def test_they_are_answered(tmp_path):
    folder = write_tool_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text(template + "{# </think> #}")
    async with open_gateway(folder) as gateway:
        gateway.worker.script = lambda job: speech(gateway.model, f"<think>so</think>{CALL}")
        for agent in AGENTS:
            for number, sent in enumerate(json.loads((FOLDER / f"{agent}.json").read_text())):
                async with gateway.http.post(
                    gateway.url + sent["path"], json=sent["body"], headers=sent["headers"]
                ) as response:
                    text = await response.text()
                assert response.status == 200, (agent, number, text)
                if sent["body"].get("stream"):
                    path = sent["path"].partition("?")[0]
                    assert ENDS.get(path, "[DONE]") in text.strip().rpartition("\n\n")[2], (agent, number, text)
