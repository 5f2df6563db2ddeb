"""Measure a decode step with and without a JSON schema per sequence, in turn, at a steady batch.

`python -m tests.support.bench_grammar [shape] [device] [batch] [steps]`, with a shape of `--model-config`, dummy
weights and a made-up vocabulary; random logits make every text new.
"""

from __future__ import annotations

import random
import sys
import time

import numpy as np

from model.sampling_params import SamplingParams
from model.text.grammar import json_grammar
from model.text.grammar_matcher import GrammarCompiler
from service.config.settings import Settings
from service.engine.build import BuiltEngine, build_engine
from service.engine.engine import Engine
from service.engine.grammars import Grammars
from service.engine.request import EngineRequest
from service.errors import EndReason
from tests.support.random_schemas import random_schema

NUM_SPECIAL = 256
PROMPT_TOKENS = 500
WARM_TOKENS = 5  # of each sequence, before timing
LETTERS = "etaoinshrdlucmfwypvbgkjqxz"


class MadeUpTokens:
    """Bytes, words, capitals, numbers and words with punctuation, as in a byte-level vocabulary."""

    def __init__(self, size: int):
        self._num_plain = size - NUM_SPECIAL
        self.special_ids = frozenset(range(self._num_plain, size))
        rng, pieces = random.Random(0), {bytes([byte]) for byte in range(256)}
        while len(pieces) < self._num_plain:
            word = "".join(rng.choices(LETTERS, k=rng.randint(1, 7)))
            forms = (
                f" {word}",
                f" {word}",
                word,
                word.title(),
                word + rng.choice('"{}[]:,.();\n'),
                str(rng.randrange(1000)),
            )
            pieces.add(rng.choice(forms).encode())
        self._pieces = sorted(pieces)

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id] if token_id < self._num_plain else b"<|special_%d|>" % token_id


def endless(seed: int) -> str:
    """An array schema that no run of the bench completes."""
    item = random_schema(random.Random(seed))
    return json_grammar({"type": "array", "minItems": 10_000, "items": item, "$defs": item.pop("$defs", {})})


def step_times_s(engine: Engine, vocab_size: int, grammars: list[str | None], num_steps: int) -> np.ndarray:
    """Return the seconds of each of `num_steps` decode steps, with one sequence per grammar."""
    rng = np.random.default_rng(0)
    for number, grammar in enumerate(grammars):
        prompt = tuple(rng.integers(0, vocab_size - NUM_SPECIAL, PROMPT_TOKENS).tolist())
        options = SamplingParams(
            max_tokens=num_steps * 4 + 400, temperature=1.0, seed=number, ignore_eos=True, grammar=grammar
        )
        engine.add_request(EngineRequest(request_id=str(number), prompt=prompt, sampling=options))
    while len(engine.running) < len(grammars) or any(one.num_output_tokens < WARM_TOKENS for one in engine.running):
        engine.step()
        ends = {output.end for output in engine.drain_request_outputs()} - {None}
        if ends:
            raise AssertionError(f"a request ended before its time: {ends}")
    times_s = []
    for _ in range(num_steps):
        begin_s = time.perf_counter()
        engine.step()
        times_s.append(time.perf_counter() - begin_s)
    num_left = len(engine.running)
    engine.cancel_all(EndReason.CANCELLED)
    while engine.has_work:
        engine.step()
    engine.drain_request_outputs()
    if num_left < len(grammars):
        raise AssertionError("a request ended before its time")
    return np.array(times_s)


def build(shape: str, device: str, batch: int) -> BuiltEngine:
    settings = Settings(
        model_config=shape, load_format="dummy", device=device, max_num_seqs=batch, max_model_len=4096,
        max_prefill_chunk=8192,
    )  # fmt: skip
    return build_engine(settings, progress=False)


def main(shape: str = "llama-3.1-8b", device: str = "cuda", batch: str = "64", num_steps: str = "200") -> None:
    built = build(shape, device, int(batch))
    size = built.config.vocab_size
    compiler = GrammarCompiler(MadeUpTokens(size), size, built.config.eos_token_ids)
    built.engine._grammars = Grammars(lambda: compiler)
    grammars = [endless(seed) for seed in range(int(batch))]
    means_ms = []
    for label, own in (("free", [None] * len(grammars)), ("grammar", grammars)) * 2:
        times_ms = step_times_s(built.engine, size, own, int(num_steps)) * 1e3
        means_ms.append(times_ms.mean())
        shown = ", ".join(f"p{q} {np.percentile(times_ms, q):.3f}" for q in (50, 90, 99))
        print(f"{label:8} a step: mean {times_ms.mean():.3f} ms, {shown}", flush=True)
    free_ms, bound_ms = (means_ms[0] + means_ms[2]) / 2, (means_ms[1] + means_ms[3]) / 2
    print(f"{built.ops.device_name}, batch {batch}: grammars add {bound_ms / free_ms - 1:.1%}")


if __name__ == "__main__":
    main(*sys.argv[1:])
