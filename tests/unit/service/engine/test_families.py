"""Families whose layers are not Llama's, through the whole engine: the tokens of transformers, alone and together."""

from __future__ import annotations

import pytest

from model.sampling_params import SamplingParams
from service.config.settings import Settings
from service.engine.build import build_engine
from service.engine.request import EngineRequest
from tests.support.goldens import Golden

NAMES = (
    *("granite_tied_bf16", "ministral3_wrapped5_bf16", "olmo3_bf16", "phi4_mini_longrope_bf16", "smollm3_tied_bf16"),
    *("mixtral_bf16", "qwen3_moe_bf16", "qwen3_moe_dense_layer_bf16"),
)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens(name: str):
    golden = Golden.load(name)
    prompt, expected = golden.token_ids[: golden.num_prompt].tolist(), golden.token_ids[golden.num_prompt :].tolist()
    settings = Settings(model=str(golden.folder), device="cpu", max_model_len=128, max_num_batched_tokens=24)
    engine = build_engine(settings, progress=False).engine
    params = SamplingParams(max_tokens=len(expected), temperature=0.0, ignore_eos=True)
    tokens: dict[str, list[int]] = {}
    for request_id in ("first", "second"):  # the second starts from cached blocks
        engine.add_request(EngineRequest(request_id=request_id, prompt=tuple(prompt), sampling=params))
        for _ in range(10):
            engine.step()
    while engine.has_work:
        engine.step()
    for output in engine.drain_request_outputs():
        for part in output.parts:
            tokens.setdefault(output.request_id, []).extend(part.token_ids)
    assert tokens == {"first": expected, "second": expected}
