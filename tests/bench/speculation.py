"""Tokens a second of the demo model with drafts over those without, on the CPU.

    OPENBLAS_NUM_THREADS=1 python -m tests.bench.speculation [--method ngram] [--batch 1,8,32] [--rounds 7] [--out FILE]

Two engines of one process get the same requests and take turns step by step; time is CPU time of this thread, since
other processes slow both. The ratio is the median over rounds. Both must emit the same tokens.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from model.sampling_params import SamplingParams
from model.text.tokenizer import Tokenizer
from service.bench.flag_values import whole_number
from service.bench.report import add_report_flags, check_report_flags, run_script, write_report
from service.cli.table import print_grid
from service.config.settings import Settings
from service.config.speculative import SpeculativeConfig, parse_speculative_config
from service.engine.build import build_engine
from service.engine.engine import Engine
from service.engine.request import EngineRequest
from tests.support.demo_engine import DEMO

CONFIGS = {
    "ngram": '{"method": "ngram", "num_speculative_tokens": 16, "prompt_lookup_min": 3, "prompt_lookup_max": 5}',
    "suffix": '{"method": "suffix", "num_speculative_tokens": 16}',
}
MAX_TOKENS = 96
QUESTIONS = (
    "Tell me a story about a fox and a lantern.",
    "Tell me a joke",
    "Count to ten",
    "Write a poem about the sea",
    "List three animals",
    "What colour is the sky?",
    "Explain how a transformer works",
    "Tell me a long story about two friends",
)


@dataclass(frozen=True)
class Case:
    name: str
    prompts: list[tuple[int, ...]]
    temperature: float


@dataclass(frozen=True, kw_only=True)
class Figures:
    case: str
    batch: int
    ratio: float
    lowest: float
    highest: float
    plain_tokens_per_s: float
    num_tokens: int  # of all rounds
    num_drafted: int
    num_accepted: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--method", choices=CONFIGS, default="ngram", help="what drafts (default: ngram)")
    parser.add_argument("--batch", default="1,8,32", help="requests at once (default: 1,8,32)")
    parser.add_argument("--rounds", default="7", help="runs of each engine (default: 7)")
    add_report_flags(parser)
    flags = parser.parse_args()
    check_report_flags(flags)
    num_rounds = whole_number("--rounds", flags.rounds)
    batches = [whole_number("--batch", part) for part in flags.batch.split(",")]
    plain, drafting = make_engine(None), make_engine(parse_speculative_config(CONFIGS[flags.method]))
    rows = []
    for batch in batches:
        for case in cases(batch, plain):
            rows.append(compare(plain, drafting, case, batch, num_rounds))
            print(rows[-1], flush=True)
    print_grid(list(asdict(rows[0])), [[_text(value) for value in asdict(row).values()] for row in rows])
    by_batch = {batch: [row for row in rows if row.batch == batch] for batch in batches}
    series = [
        {"label": f"batch {batch}", "x": [row.case for row in own], "y": [row.ratio for row in own]}
        for batch, own in by_batch.items()
    ]
    panel = {"kind": "bars", "title": "tokens a second over none", "x": "", "y": "ratio", "series": series}
    record = {"bench": "speculation", "config": CONFIGS[flags.method], "cases": [asdict(row) for row in rows]}
    write_report(flags, record, {"title": flags.method, "panels": [panel]})


def make_engine(config: SpeculativeConfig | None) -> Engine:
    sizes = {"max_model_len": 1024, "max_num_seqs": 64, "num_gpu_blocks": 3000}
    settings = Settings(model=DEMO, device="cpu", enable_prefix_caching=False, speculative_config=config, **sizes)
    return build_engine(settings, progress=False).engine


def cases(batch: int, plain: Engine) -> Iterator[Case]:
    """Yield random text, questions, and questions that were answered before in the prompt: the model says it again."""
    tokenizer, rng = Tokenizer.read(DEMO), random.Random(batch)

    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    yield Case("random text", [tuple(rng.choices(range(5, 4096), k=64)) for _ in range(batch)], 1.0)
    questions = [(0, 3, *encode(QUESTIONS[number % len(QUESTIONS)]), 1, 4) for number in range(batch)]
    yield Case("questions, greedy", questions, 0.0)
    yield Case("questions, T 0.7", questions, 0.7)
    asked = Case("question asked again", questions, 0.0)
    answers = run(asked, plain)[0][0].values()
    again = [(*question, *answer, 1, *question[1:]) for question, answer in zip(questions, answers, strict=True)]
    yield replace(asked, prompts=again)


def compare(plain: Engine, drafting: Engine, case: Case, batch: int, num_rounds: int) -> Figures:
    before, ratios, plain_s, num_tokens = drafting.stats(), [], [], 0
    for _ in range(num_rounds):
        tokens, seconds = run(case, plain, drafting)
        if tokens[0] != tokens[1]:
            raise AssertionError(f"{case.name}: drafts changed a token")
        ratios.append(seconds[0] / seconds[1])
        plain_s.append(seconds[0])
        num_tokens += sum(map(len, tokens[0].values()))
    after = drafting.stats()
    return Figures(
        case=case.name,
        batch=batch,
        ratio=statistics.median(ratios),
        lowest=min(ratios),
        highest=max(ratios),
        plain_tokens_per_s=num_tokens / num_rounds / statistics.median(plain_s),
        num_tokens=num_tokens,
        num_drafted=after.num_draft_tokens - before.num_draft_tokens,
        num_accepted=after.num_accepted_tokens - before.num_accepted_tokens,
    )


def run(case: Case, *engines: Engine) -> tuple[list[dict[str, list[int]]], list[float]]:
    """Return each engine's tokens by request, and its seconds."""
    for number, prompt in enumerate(case.prompts):
        sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=case.temperature, seed=number, ignore_eos=True)
        for engine in engines:
            engine.add_request(EngineRequest(request_id=str(number), prompt=prompt, sampling=sampling))
    tokens: list[dict[str, list[int]]] = [{str(number): [] for number in range(len(case.prompts))} for _ in engines]
    seconds = [0.0] * len(engines)
    while any(engine.has_work for engine in engines):
        for index, engine in enumerate(engines):
            if not engine.has_work:
                continue
            start_s = time.thread_time()
            engine.step()
            outputs = engine.drain_request_outputs()
            seconds[index] += time.thread_time() - start_s
            for output in outputs:
                for part in output.parts:
                    tokens[index][output.request_id] += part.token_ids
    return tokens, seconds


def _text(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    run_script(main)
