"""Tokens of the demo model with drafts and without, on the CPU: they must be equal.

    python -m tests.bench.speculative_tokens [--prompts 1000] [--kinds penalties,logprobs] [--drafters eagle3] [--out F]

Every prompt is sent in each kind of sampling, to an engine without drafts and to one with as many as are found. Batches
of prompts take turns with n-gram, suffix, a drafter that knows the answer and errs at random positions, the model's
EAGLE-3 head, and its first two layers as a draft model. The file is written after each batch. Exits with 1 if a token,
an end or a log-probability differs.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from model.families.eagle3 import Eagle3Head, load_eagle3
from model.families.llama import Llama
from model.ops.cpu.ops import NumpyOps
from model.sampling_params import SamplingParams
from model.text.grammar import regex_grammar
from model.text.tokenizer import Tokenizer
from service.bench.flag_values import whole_number
from service.bench.report import check_report_flags, run_script, write_report
from service.engine.drafting.ngram import NgramDrafter
from service.engine.drafting.suffix import SuffixDrafter
from service.engine.engine import Engine
from service.engine.request import EngineRequest
from service.errors import StartupError
from tests.fakes.drafters import FakeDrafter, KnowingDrafter
from tests.support.demo_engine import DEMO, MAX_LEN, TWO_LAYERS, DemoEngines
from tests.support.received import Received, run_steps

KINDS = {
    "greedy": {"temperature": 0.0},
    "temperature 0.8": {"temperature": 0.8},
    "top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "n = 3": {"temperature": 0.8, "n": 3, "best_of": 3},
    "grammar": {"temperature": 0.8, "grammar": regex_grammar("[a-z ]{5,40}")},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    "logprobs": {"temperature": 0.8, "logprobs": 3},
}
ANIMALS = ("fox", "bear", "dog", "cat", "bird", "mouse", "rabbit", "duck")
PLACES = ("house", "river", "garden", "forest", "shop", "school", "beach")
TOKENIZER = Tokenizer.read(DEMO)
PROMPTS_AT_ONCE = 50
MAX_TOKENS = 16
LOGPROB_TOLERANCE = 2e-4


def _knowing(_engines: DemoEngines, plain: dict[str, Received]) -> FakeDrafter:
    answers = {
        (name, branch): tokens for name, received in plain.items() for branch, tokens in received.branches.items()
    }
    return KnowingDrafter(answers, errs=True)


def _eagle3(engines: DemoEngines, _plain: dict[str, Received]) -> Eagle3Head:
    model = engines.model
    return load_eagle3(DEMO / "eagle3", model.config, model.weights.embedding, MAX_LEN)


DRAFTERS: dict[str, Callable[[DemoEngines, dict[str, Received]], Any]] = {
    "ngram": lambda _engines, _plain: NgramDrafter(1, 4),
    "suffix": lambda _engines, _plain: SuffixDrafter(
        max_depth=24, max_requests=1000, max_spec_factor=2.0, min_token_prob=0.1
    ),
    "knowing": _knowing,
    "eagle3": _eagle3,
    "draft_model": lambda engines, _plain: DemoEngines(engines.model.ops, num_layers=TWO_LAYERS).model,
}


@dataclass
class Figures:
    kind: str
    drafters: str
    num_answers: int = 0
    num_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_different: int = 0  # answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompts", default="1000", help="prompts of each kind (default: 1000)")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"some of: {', '.join(KINDS)} (default: all)")
    parser.add_argument("--drafters", default=",".join(DRAFTERS), help=f"some of: {', '.join(DRAFTERS)} (default: all)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON file for the figures (default: none)")
    parser.set_defaults(plot=None)
    flags = parser.parse_args()
    check_report_flags(flags)
    kinds, drafters = chosen("--kinds", flags.kinds, KINDS), chosen("--drafters", flags.drafters, DRAFTERS)
    num_prompts, start_s = whole_number("--prompts", flags.prompts), time.monotonic()
    figures: dict[str, Figures] = {}
    for row in measure(num_prompts, kinds, drafters):
        figures[row.kind] = row
        rows = [asdict(one) for one in figures.values()]
        record = {"bench": "speculative_tokens", "elapsed_s": round(time.monotonic() - start_s), "kinds": rows}
        write_report(flags, record, {})
    for row in figures.values():
        print(row)
    if any(row.num_different for row in figures.values()):
        sys.exit(1)


def chosen(flag: str, given: str, known: Collection[str]) -> list[str]:
    names = [name.strip() for name in given.split(",")]
    if unknown := [name for name in names if name not in known]:
        raise StartupError(f"{flag}: {unknown[0]!r} is not known ({', '.join(known)})")
    return names


def measure(num_prompts: int, kinds: list[str], drafters: list[str]) -> Iterator[Figures]:
    """Yield the figures of a kind so far after each batch."""
    engines, rng = DemoEngines(NumpyOps(np.dtype(np.float32))), random.Random(0)
    prompts = [drawn_prompt(rng) for _ in range(num_prompts)]
    for kind in kinds:
        yield from _measure_kind(engines, kind, drafters, prompts)


def drawn_prompt(rng: random.Random) -> tuple[int, ...]:
    """Return tokens at random, or of a story, that repeat: drafts are found."""
    if rng.random() < 0.5:
        return tuple([rng.randrange(5, 1500) for _ in range(rng.randrange(2, 12))] * 3)
    story = f"The {rng.choice(ANIMALS)} and the {rng.choice(ANIMALS)} went to the {rng.choice(PLACES)}. " * 3
    return tuple(TOKENIZER.encode(story, add_special_tokens=False))


def _measure_kind(
    engines: DemoEngines, kind: str, drafters: list[str], prompts: list[tuple[int, ...]]
) -> Iterator[Figures]:
    figures = Figures(kind, ",".join(drafters))
    for number, first in enumerate(range(0, len(prompts), PROMPTS_AT_ONCE)):
        some = prompts[first : first + PROMPTS_AT_ONCE]
        requests = [
            EngineRequest(
                request_id=str(first + index),
                prompt=prompt,
                sampling=SamplingParams(max_tokens=MAX_TOKENS, seed=first + index, ignore_eos=True, **KINDS[kind]),
            )
            for index, prompt in enumerate(some)
        ]
        plain = _received(engines.make(num_blocks=1200, budget=512, max_num_seqs=48), requests)
        drafter = DRAFTERS[drafters[number % len(drafters)]](engines, plain)
        is_model = isinstance(drafter, Eagle3Head | Llama)
        drafts = {"draft" if is_model else "drafter": drafter}
        drafting = engines.make(num_blocks=1200, budget=512, max_num_seqs=48, **drafts)
        drafted = _received(drafting, requests)
        stats = drafting.stats()
        figures.num_drafted += stats.num_draft_tokens
        figures.num_accepted += stats.num_accepted_tokens
        for name, received in plain.items():
            figures.num_answers += 1
            figures.num_tokens += received.num_output_tokens
            figures.num_different += not _are_equal(received, drafted[name])
        yield figures


def _received(engine: Engine, requests: list[EngineRequest]) -> dict[str, Received]:
    for request in requests:
        engine.add_request(request)
    return run_steps(engine)


def _are_equal(one: Received, other: Received) -> bool:
    if (one.by_branch(), one.end, one.choices) != (other.by_branch(), other.end, other.choices):
        return False
    pairs = ((one.logprobs[branch], other.logprobs[branch]) for branch in one.branches)
    return all(np.allclose([*_numbers(a)], [*_numbers(b)], atol=LOGPROB_TOLERANCE) for a, b in pairs)


def _numbers(logprobs: list) -> Iterator[float]:
    return (number for one in logprobs for number in (one.logprob, *one.top_logprobs))


if __name__ == "__main__":
    run_script(main)
