"""Ask the demo model for an answer to each of many random JSON schemas, and count the valid ones.

`python -m tests.support.check_schemas [count] [device]`; exits with 1 if any is invalid. Every other schema allows
whitespace; temperatures are 0, 0.7 and 1.5 in turn.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

from model.sampling_params import SamplingParams
from model.text.grammar import COMPACT, WHITESPACE, json_grammar
from model.text.tokenizer import Tokenizer
from service.config.settings import Settings
from service.engine.build import build_engine
from service.engine.request import EngineRequest
from service.errors import EndReason
from tests.support.random_schemas import random_schema
from tests.support.schema_validator import is_valid

DEMO = Path(__file__).parents[2] / "model" / "demo"
MAX_TOKENS = 1500
TEMPERATURES = (0.0, 0.7, 1.5)


def main(count: int, device: str) -> int:
    engine = build_engine(Settings(model=DEMO, device=device, max_num_seqs=64), progress=False).engine
    tokenizer = Tokenizer.read(DEMO)
    schemas = {str(seed): random_schema(random.Random(seed)) for seed in range(count)}
    prompt = tuple(tokenizer.encode("Tell me about it as JSON: "))
    for seed, (name, schema) in enumerate(schemas.items()):
        grammar = json_grammar(schema, whitespace=WHITESPACE if seed % 2 else COMPACT)
        options = SamplingParams(max_tokens=MAX_TOKENS, temperature=TEMPERATURES[seed % 3], seed=seed, grammar=grammar)
        engine.add_request(EngineRequest(request_id=name, prompt=prompt, sampling=options))
    start_s, generated, ends = time.perf_counter(), {name: [] for name in schemas}, {}
    while engine.has_work:
        engine.step()
        for output in engine.drain_request_outputs():
            for part in output.parts:
                generated[output.request_id] += part.token_ids
            if output.end is not None:
                ends[output.request_id] = output.end
    bad = [name for name in schemas if not _is_good(tokenizer.decode(generated[name]), ends[name], schemas[name])]
    for name in bad[:10]:
        print(f"{name}: {ends[name]} {tokenizer.decode(generated[name])[:200]!r} for {json.dumps(schemas[name])[:300]}")
    num_tokens, took_s = sum(map(len, generated.values())), time.perf_counter() - start_s
    print(f"{count - len(bad)} of {count} valid, {num_tokens} tokens in {took_s:.0f} s")
    return 1 if bad else 0


def _is_good(text: str, end: EndReason, schema: dict) -> bool:
    """Return whether the answer is valid; one cut off at max_tokens is not."""
    return end is EndReason.STOP and is_valid(json.loads(text), schema)


if __name__ == "__main__":
    sys.exit(main(int((sys.argv[1:2] or ["1000"])[0]), (sys.argv[2:3] or ["cpu"])[0]))
