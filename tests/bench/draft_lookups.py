"""Host time of a lookup of n-gram and suffix drafts, per sequence.

    python -m tests.bench.draft_lookups [--rounds 5] [--out FILE]

Sequences grow by a token and are asked in each step; the tenant has finished 300 outputs of 700 tokens.
A lookup's time is the least of all rounds, in CPU time of this thread: other processes slow single ones.
"""

from __future__ import annotations

import argparse
import random
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from service.bench.flag_values import whole_number
from service.engine.drafting.drafter import MAX_DRAFTS, Drafter
from service.engine.drafting.ngram import NgramDrafter
from service.engine.drafting.suffix import SuffixDrafter
from tests.support.measuring import report

DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "ngram 2 to 5": lambda: NgramDrafter(2, 5),
    "ngram 1 to 64": lambda: NgramDrafter(1, 64),
    "suffix": lambda: SuffixDrafter(max_depth=24, max_requests=10_000, max_spec_factor=1.0, min_token_prob=0.1),
}
NUM_OUTPUTS, OUTPUT_TOKENS = 300, 700
NUM_SEQUENCES, FIRST_TOKENS, LAST_TOKENS = 8, 300, 700


@dataclass(eq=False)
class Growing:
    """The fields of a sequence that drafters read."""

    token_ids: array[int]
    num_prompt_tokens: int = 0
    group: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(tenant="one"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", default="5", help="runs of each case (default: 5)")
    parser.add_argument("--out", type=Path, help="JSON file for the figures (default: none)")
    flags = parser.parse_args()
    num_rounds, cases = whole_number("--rounds", flags.rounds), []
    for name, make in DRAFTERS.items():
        for kind, texts in TEXTS.items():
            runs = [measure(make(), texts) for _ in range(num_rounds)]
            lookups_us = 1e6 * np.min([lookups for lookups, _ in runs], axis=0)
            p50, p99, most = np.percentile(lookups_us, (50, 99, 100)).round(1).tolist()
            ends_us = round(1e6 * min(end_s for _, end_s in runs), 1)
            cases.append(
                {"drafter": name, "text": kind, "p50_us": p50, "p99_us": p99, "max_us": most, "end_us": ends_us}
            )
            print(cases[-1], flush=True)
    report({"bench": "draft_lookups", "cases": cases}, flags.out)


def measure(drafter: Drafter, texts: Callable[[random.Random], Iterator[int]]) -> tuple[list[float], float]:
    """Return the seconds of each lookup, and the mean of a finished output."""
    rng = random.Random(0)
    outputs = [Growing(_tokens(texts(rng), OUTPUT_TOKENS)) for _ in range(NUM_OUTPUTS)]
    start_s = time.thread_time()
    for output in outputs:
        drafter.on_end(output)
    end_s = (time.thread_time() - start_s) / NUM_OUTPUTS
    streams = [texts(rng) for _ in range(NUM_SEQUENCES)]
    sequences = [Growing(_tokens(stream, FIRST_TOKENS)) for stream in streams]
    for sequence in sequences:
        drafter.draft([sequence], [MAX_DRAFTS])  # reads the prompt
    seconds = []
    for _ in range(FIRST_TOKENS, LAST_TOKENS):
        for sequence, stream in zip(sequences, streams, strict=True):
            sequence.token_ids.append(next(stream))
            start_s = time.thread_time()
            drafter.draft([sequence], [MAX_DRAFTS])
            seconds.append(time.thread_time() - start_s)
    return seconds, end_s


def _tokens(stream: Iterator[int], count: int) -> array[int]:
    return array("I", (next(stream) for _ in range(count)))


def _random(rng: random.Random) -> Iterator[int]:
    while True:
        yield rng.randrange(4000)


def _copied(rng: random.Random) -> Iterator[int]:
    """Yield pieces of one page, and at times another token: runs match for long, then differ."""
    page = random.Random(1).choices(range(60), k=200)
    while True:
        start = rng.randrange(len(page))
        yield from page[start : start + rng.randrange(5, 100)]
        yield rng.randrange(60)


def _repeated(rng: random.Random) -> Iterator[int]:
    """Yield an answer that the tenant got before, with a wrong token now and then: nothing of it occurs twice."""
    for token in random.Random(2).sample(range(4000), k=LAST_TOKENS):
        yield token if rng.random() < 0.95 else rng.randrange(4000)


def _looping(rng: random.Random) -> Iterator[int]:
    """Yield one page again and again."""
    page = random.Random(1).choices(range(60), k=200)
    while True:
        yield from page


TEXTS = {"random": _random, "copied": _copied, "repeated": _repeated, "looping": _looping}


if __name__ == "__main__":
    main()
