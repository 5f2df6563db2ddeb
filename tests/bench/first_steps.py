"""Slow steps of a server's first minute: products that hold the host for over 3 ms, in a first and a second pass over
the same requests, paced by a trace.

`python -m tests.bench.first_steps --trace chat.json --rate 60 --num-requests 900` (a GPU; Llama-3.1-8B's shape, random
weights). In the second pass no size is new.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from model.sampling_params import SamplingParams
from service.bench.trace import TracedRequest, read_trace
from service.config.settings import Settings
from service.engine.build import build_engine
from service.engine.engine import Engine
from service.engine.request import EngineRequest

SLOW_CALL_S = 0.003
SLOW_STEP_S = 0.035


class SlowProducts:
    """Recorder of products that hold the host, in place of `ops.linear`."""

    def __init__(self, ops):
        self._linear = ops.linear
        self.calls: list[tuple[float, tuple, tuple]] = []  # milliseconds, shapes of x and weight
        ops.linear = self

    def __call__(self, x, weight, *args, **options):
        start_s = time.perf_counter()
        out = self._linear(x, weight, *args, **options)
        took_s = time.perf_counter() - start_s
        if took_s > SLOW_CALL_S:
            self.calls.append((round(1e3 * took_s, 1), x.shape, weight.shape))
        return out


def run_pass(engine: Engine, requests: Sequence[TracedRequest], rate: float, number: int) -> dict:
    """Run all requests, each added when due. Return TTFTs and slow steps, in milliseconds."""
    rng = np.random.default_rng(number)
    due_s = [request.arrival / rate for request in requests]
    first_s: dict[str, float] = {}
    slow_steps, added = [], 0
    start_s = time.perf_counter()
    while added < len(requests) or engine.has_work:
        while added < len(requests) and due_s[added] <= time.perf_counter() - start_s:
            one = requests[added]
            prompt = tuple(rng.integers(0, 4096, one.num_prompt_tokens).tolist())
            sampling = SamplingParams(max_tokens=one.num_output_tokens, temperature=0.0, ignore_eos=True)
            engine.add_request(EngineRequest(request_id=str(added), prompt=prompt, sampling=sampling))
            added += 1
        if not engine.has_work:
            time.sleep(0.0005)
            continue
        before_s = time.perf_counter()
        engine.step()
        now_s = time.perf_counter()
        if now_s - before_s > SLOW_STEP_S:
            slow_steps.append((round(now_s - start_s, 2), round(1e3 * (now_s - before_s), 1)))
        for output in engine.drain_request_outputs():
            first_s.setdefault(output.request_id, now_s - start_s - due_s[int(output.request_id)])
    ttft = np.percentile([1e3 * value for value in first_s.values()], (50, 90, 99))
    return {"ttft_ms": [round(float(value), 1) for value in ttft], "slow_steps": slow_steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--rate", type=float, default=60.0)
    parser.add_argument("--num-requests", type=int, default=900)
    flags = parser.parse_args()
    settings = Settings(
        model_config="llama-3.1-8b", load_format="dummy", max_num_seqs=512, enable_prefix_caching=False, swap_space=0.0
    )
    built = build_engine(settings, progress=False)
    products = SlowProducts(built.ops)
    requests = read_trace(flags.trace)[: flags.num_requests]
    for number in range(2):
        products.calls.clear()
        found = run_pass(built.engine, requests, flags.rate, number)
        print(json.dumps({"pass": number, **found, "slow_products": products.calls}), flush=True)


if __name__ == "__main__":
    main()
