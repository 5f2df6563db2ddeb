"""Experts of a running batch, and the bytes that its step reads."""

from __future__ import annotations

from dataclasses import replace

from model.sampling_params import SamplingParams
from service.config.settings import Settings
from service.engine.build import build_engine
from service.engine.request import EngineRequest
from tests.bench.experts_in_use import bytes_of_products, experts_in_use
from tests.support.goldens import FOLDER


def test_experts_of_the_running_sequences_are_counted():
    settings = replace(Settings(), model=FOLDER / "qwen3_moe_bf16", device="cpu", num_gpu_blocks=32, max_num_seqs=8)
    built = build_engine(settings, progress=False)
    experts = built.config.experts
    assert experts is not None
    layer = built.executor.model.weights.layers[0]
    counts = []
    for number in range(6):
        prompt = tuple(range(7 * number, 7 * number + 9))
        params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
        built.engine.add_request(EngineRequest(request_id=str(number), prompt=prompt, sampling=params))
        for _ in range(3):
            built.engine.step()
        counts.append(experts_in_use(built))
    assert counts[0] == experts.num_used
    assert counts[0] < counts[-1] <= experts.num_experts
    num_bytes = bytes_of_products(built.executor.model, counts[0])
    both = len(built.executor.model.weights.layers) * experts.num_used / experts.num_experts
    assert num_bytes["experts down"] == both * layer.down.nbytes
    assert num_bytes["linear qkv"] == len(built.executor.model.weights.layers) * layer.qkv.nbytes
    while built.engine.has_work:  # nothing was spoiled
        built.engine.step()
