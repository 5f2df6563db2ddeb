"""`quire serve --tensor-parallel-size 2` on the CPU."""

from __future__ import annotations

import openai

from tests.support.served import Served

STORY = [{"role": "user", "content": "Tell me a story about a fox."}]


def test_a_divided_demo_model_answers(tmp_path):
    running = Served(tmp_path / "data", "-tp", "2")
    try:
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none") as client:
            model = client.models.list().data[0].id
            answer = client.chat.completions.create(model=model, messages=STORY, temperature=0, max_tokens=40, n=2)
            first, second = (choice.message.content for choice in answer.choices)
    finally:
        running.terminate()
    assert "ranks=2" in running.output
    assert first == second
    assert "fox" in first.lower()
