"""`quire quantize`, then `quire serve` of what it wrote, on the CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import openai
import pytest

from tests.support.served import REPOSITORY, Served

STORY = [{"role": "user", "content": "Tell me a story about a fox."}]


@pytest.mark.parametrize(("name", "label"), [("fp8", "float-quantized"), ("int4-g128", "pack-quantized")])
def test_a_quantised_demo_model_is_checked_and_answers(tmp_path: Path, name: str, label: str):
    quire, out = [sys.executable, "-m", "service.cli.entry"], str(tmp_path / "model")
    demo = str(REPOSITORY / "model" / "demo")
    subprocess.run([*quire, "quantize", "--model", demo, "--format", name, "--out", out], cwd=REPOSITORY, check=True)
    check = [*quire, "check", "--model", out, "--device", "cpu"]
    table = subprocess.run(check, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout
    assert f"compressed-tensors {label}" in table
    running = Served(tmp_path / "data", "--model", out)
    try:
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none") as client:
            model = client.models.list().data[0].id
            answer = client.chat.completions.create(model=model, messages=STORY, temperature=0, max_tokens=60)
            assert "fox" in answer.choices[0].message.content.lower()
    finally:
        running.terminate()
