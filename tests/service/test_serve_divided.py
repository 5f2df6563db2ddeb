"""`quire serve --tensor-parallel-size 2` on the CPU, with an adapter."""

from __future__ import annotations

import json
import urllib.request

import openai
import pytest

from model.config import ModelConfig
from tests.support.adapters import write_adapter
from tests.support.demo_engine import DEMO
from tests.support.served import Served

STORY = [{"role": "user", "content": "Tell me a story about a fox."}]


def test_a_divided_demo_model_answers(tmp_path):
    write_adapter(tmp_path / "adapters" / "fox", ModelConfig.read(DEMO), strength=4.0)
    flags = ("--enable-lora", "--lora-dir", str(tmp_path / "adapters"))
    running = Served(tmp_path / "data", "-tp", "2", *flags)
    try:
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none") as client:
            model = client.models.list().data[0].id
            answer = client.chat.completions.create(model=model, messages=STORY, temperature=0, max_tokens=40, n=2)
            first, second = (choice.message.content for choice in answer.choices)
            post(running, "/v1/load_lora_adapter", {"lora_name": "fox", "lora_path": "fox"})
            story = {"prompt": list(range(100, 120)), "temperature": 0, "max_tokens": 8}
            base, adapted = (client.completions.create(model=name, **story) for name in (model, "fox"))
            post(running, "/v1/unload_lora_adapter", {"lora_name": "fox"})
            with pytest.raises(openai.NotFoundError):
                client.completions.create(model="fox", **story)
    finally:
        running.terminate()
    assert "ranks=2" in running.output
    assert first == second
    assert "fox" in first.lower()
    assert base.choices[0].text != adapted.choices[0].text


def post(running: Served, path: str, body: dict[str, str]) -> None:
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(running.url + path, data, headers), timeout=60).close()
