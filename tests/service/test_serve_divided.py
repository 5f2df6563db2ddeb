"""`quire serve --tensor-parallel-size 2` on the CPU says what one rank says."""

from __future__ import annotations

import openai

from tests.support.served import Served

STORY = [{"role": "user", "content": "Tell me a story about a fox."}]


def test_a_divided_demo_model_answers(tmp_path):
    texts = []
    for number, flags in enumerate([("-tp", "2"), ()]):
        running = Served(tmp_path / str(number), *flags)
        try:
            with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none") as client:
                model = client.models.list().data[0].id
                answer = client.chat.completions.create(model=model, messages=STORY, temperature=0, max_tokens=30, n=2)
                texts.append([choice.message.content for choice in answer.choices])
        finally:
            running.terminate()
        assert ("ranks=2" in running.output) == bool(flags)
    assert texts[0] == texts[1]
    assert "fox" in texts[0][0].lower()
