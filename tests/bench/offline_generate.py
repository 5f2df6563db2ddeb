"""`LLM.generate` against the engine alone, on the same requests in turns.

`python -m tests.bench.offline_generate --rounds 5` prints CPU seconds of all threads, which other programs on the
machine change little, and wall time. The engine alone is what `quire bench engine --trace` runs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable

import numpy as np

from service.bench.engine_measures import measure_trace
from service.bench.trace import TracedRequest
from service.engine.build import build_engine
from service.garbage import freeze_heap
from service.offline.api import LLM, SamplingParams
from service.offline.prompts import Prompt
from service.offline.settings import read_keywords

KEYWORDS = {"max_model_len": 64, "enable_prefix_caching": False}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--prompt", type=int, default=16, help="tokens")
    parser.add_argument("--output", type=int, default=24, help="tokens")
    parser.add_argument("--texts", action="store_true", help="prompts are texts, about as long")
    flags = parser.parse_args()
    built, llm = build_engine(read_keywords(KEYWORDS), progress=True), LLM(**KEYWORDS)
    tokenizer = llm.get_tokenizer()
    freeze_heap()
    random = np.random.default_rng(0)
    ids = [random.integers(0, built.config.vocab_size, flags.prompt).tolist() for _ in range(flags.requests)]
    prompts: list[Prompt] = [tokenizer.decode(each) if flags.texts else each for each in ids]
    lengths = [len(tokenizer.encode(each)) if isinstance(each, str) else flags.prompt for each in prompts]
    params = SamplingParams(max_tokens=flags.output, temperature=0.0, ignore_eos=True)
    trace = [TracedRequest(length, flags.output, 0.0) for length in lengths]
    works: dict[str, Callable[[], object]] = {
        "engine alone": lambda: measure_trace(built, trace, engine_start_s=0.0),
        "LLM.generate": lambda: llm.generate(prompts, params),
    }
    times_s: defaultdict[str, list[float]] = defaultdict(list)
    for number in range(flags.rounds):
        for name in sorted(works, reverse=bool(number % 2)):
            before_s, wall_before_s = time.process_time(), time.perf_counter()
            works[name]()
            times_s[f"{name}, CPU"].append(time.process_time() - before_s)
            times_s[f"{name}, wall"].append(time.perf_counter() - wall_before_s)
    for name, own in sorted(times_s.items()):
        print(f"{name}: median {statistics.median(own):.2f} s of {[round(each, 2) for each in own]}")


if __name__ == "__main__":
    main()
