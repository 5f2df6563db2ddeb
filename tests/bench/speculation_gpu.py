"""Steps with drafts on a device: tokens that differ from those without, time, and output tokens a second over none.

    python -m tests.bench.speculation_gpu [--parts tokens,steps,runs] [--batch 1,16,64,256] [--out FILE]

Weights are random. For the times the head is zero: greedy sampling emits one token for ever, so that a drafter can be
right at any rate, and sampling at temperature 1 emits text in which n-grams find nothing. `free` drafts cost the device
nothing; tests/bench/eagle3_gpu.py measures a head's.
"""

from __future__ import annotations

import argparse
import copy
import random
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from unittest.mock import patch

import numpy as np

from model.sampling_params import SamplingParams
from model.step_inputs import ForwardInputs, StepInputs
from service.bench.flag_values import whole_number
from service.bench.report import add_report_flags, check_report_flags, run_script, write_report
from service.cli.table import print_grid
from service.config.settings import Settings
from service.config.speculative import SpeculativeConfig
from service.engine.build import BuiltEngine, build_engine
from service.engine.drafting.build import step_cost
from service.engine.drafting.drafter import NGRAM
from service.engine.drafting.lengths import DraftLengths, StepCost
from service.engine.drafting.ngram import NgramDrafter
from service.engine.request import EngineRequest
from service.engine.scheduling.speculation import Speculation
from service.errors import EndReason
from tests.fakes.drafters import KnowingDrafter

MAX_DRAFTS = 8
CONTEXTS = (256, 1024, 4096)
PROMPT_TOKENS = 256
NUM_TOKENS = 300
DRAFT_VOCAB = 32_000
NUM_TIMED = 30
NUM_MEANS = 10
"""Means of a run that give its error."""
MIN_ANSWERS, ANSWER_TOKENS = 16, 64
RATES = (0.6, 0.8)
PARTS = ("tokens", "steps", "runs")


class ForcedDrafter:
    """Each draft is right with a chance of `rate`."""

    source, writes_cache, token_s = NGRAM, False, 0.0

    def __init__(self, token_id: int, rate: float):
        self._token_id, self._rate, self._rng = token_id, rate, random.Random(0)

    def draft(self, sequences, max_tokens):
        return [tuple(self._token_id + (self._rng.random() > self._rate) for _ in range(n)) for n in max_tokens]

    def on_end(self, sequence) -> None:
        """Keep nothing."""


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    context: int
    num_drafts: int
    step_us: float
    ratio: float  # to no drafts


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    batch: int
    drafts: str
    tokens_per_s: float
    ratio: float  # to none, the mean of the runs before and after
    step_ms: float
    drafted: float  # per sequence and step
    accepted: float  # of the drafted


@dataclass(frozen=True, kw_only=True)
class TokenFigures:
    batch: int
    temperature: float
    num_answers: int
    num_tokens: int  # up to each answer's first difference
    num_different: int  # answers
    num_accepted: int


@dataclass(frozen=True, kw_only=True)
class RunTotals:
    batch: int
    seconds: float = 0.0
    num_drafted: int = 0
    num_accepted: int = 0
    step_tokens: tuple[int, ...] = ()  # of all sequences, by step

    @property
    def tokens_per_s(self) -> float:
        return sum(self.step_tokens) / self.seconds

    @property
    def step_s(self) -> float:
        return self.seconds / len(self.step_tokens)

    @property
    def drafted(self) -> float:
        """Drafts per sequence and step."""
        return self.num_drafted / len(self.step_tokens) / self.batch

    @property
    def accepted(self) -> float:
        """Share of the drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def error(self) -> float:
        """Standard error of the tokens a step over their mean, from NUM_MEANS means."""
        means = [part.mean() for part in np.array_split(np.array(self.step_tokens), NUM_MEANS)]
        return float(np.std(means, ddof=1) / NUM_MEANS**0.5 / np.mean(self.step_tokens))


Figures = StepFigures | RunFigures | TokenFigures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model-config", default="llama-3.1-8b", help="shape (default: llama-3.1-8b)")
    parser.add_argument("--device", default="cuda", help="cuda or cpu (default: cuda)")
    parser.add_argument("--batch", default="1,16,64,256", help="sequences at once (default: 1,16,64,256)")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"comma-separated (default: {','.join(PARTS)})")
    add_report_flags(parser)
    flags = parser.parse_args()
    check_report_flags(flags)
    batches = [whole_number("--batch", part) for part in flags.batch.split(",")]
    parts = flags.parts.split(",")
    if set(parts) - set(PARTS):
        parser.error(f"--parts: {flags.parts} is not supported ({','.join(PARTS)})")
    built = make_engine(flags.model_config, flags.device, max(batches))
    tables: dict[str, list[Figures]] = {}
    if "tokens" in parts:
        tables["tokens"] = shown(
            compare_tokens(built, batch, temperature) for batch in batches[:2] for temperature in (0.0, 1.0)
        )
    head = built.executor.model.weights.lm_head.data
    built.ops.load_parallel([head], lambda _, start, out: out.fill(0))
    if "steps" in parts:
        tables["steps"] = shown(time_steps(built))
    if "runs" in parts:
        cost = step_cost(built.executor, built.memory.max_model_len)
        tables["runs"] = shown(row for batch in batches for row in compare(built, cost, batch))
    record = {
        "bench": "speculation_gpu",
        "model": flags.model_config,
        "device": built.ops.device_name if flags.device == "cuda" else "cpu",
        **{part: [asdict(row) for row in rows] for part, rows in tables.items()},
    }
    runs = tables.get("runs", [])
    names = dict.fromkeys(row.drafts for row in runs)
    series = [
        {"label": name, "x": [str(batch) for batch in batches], "y": [row.ratio for row in runs if row.drafts == name]}
        for name in names
    ]
    panel = {"kind": "bars", "title": "output tokens/s over none", "x": "sequences", "y": "ratio", "series": series}
    write_report(flags, record, {"title": flags.model_config, "panels": [panel]})


def shown(rows: Iterable[Figures]) -> list[Figures]:
    """Print and return the rows of a part."""
    rows = list(rows)
    print_grid(list(asdict(rows[0])), [[_text(value) for value in asdict(row).values()] for row in rows])
    return rows


def make_engine(shape: str, device: str, max_num_seqs: int) -> BuiltEngine:
    """Build an engine that can verify drafts."""
    settings = Settings(
        model_config=shape,
        load_format="dummy",
        device=device,
        max_model_len=max(CONTEXTS) + 64,
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=False,
        speculative_config=SpeculativeConfig(method="ngram", num_speculative_tokens=MAX_DRAFTS),
    )
    return build_engine(settings, progress=True)


def compare_tokens(built: BuiltEngine, batch: int, temperature: float) -> TokenFigures:
    """Draft right and wrong tokens of answers that were generated without drafts."""
    engine, num_answers = built.engine, max(batch, MIN_ANSWERS)
    with drafting(built, None, None):
        answers = generate(built, num_answers, batch, temperature)
    drafter = KnowingDrafter({(name, 0): tokens for name, tokens in answers.items()}, errs=True)
    with drafting(built, drafter, None):
        drafted = generate(built, num_answers, batch, temperature)
        num_accepted = engine.stats().num_accepted_tokens
    lengths = [
        next((at for at, (one, other) in enumerate(zip(tokens, drafted[name], strict=True)) if one != other), None)
        for name, tokens in answers.items()
    ]
    return TokenFigures(
        batch=batch,
        temperature=temperature,
        num_answers=num_answers,
        num_tokens=sum(ANSWER_TOKENS if length is None else length + 1 for length in lengths),
        num_different=sum(length is not None for length in lengths),
        num_accepted=num_accepted,
    )


def generate(built: BuiltEngine, count: int, batch: int, temperature: float) -> dict[str, list[int]]:
    """Return the tokens of `count` requests, `batch` at once."""
    engine, rng = built.engine, random.Random(count)
    tokens: dict[str, list[int]] = {}
    for number in range(count):
        prompt = tuple(rng.choices(range(10, 4000), k=32))
        sampling = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=temperature, seed=number, ignore_eos=True)
        tokens[str(number)] = []
        engine.add_request(EngineRequest(request_id=str(number), prompt=prompt, sampling=sampling))
        while engine.has_work and ((number + 1) % batch == 0 or number + 1 == count):
            engine.step()
            for output in engine.drain_request_outputs():
                tokens[output.request_id] += [token for part in output.parts for token in part.token_ids]
    return tokens


def time_steps(built: BuiltEngine) -> Iterator[StepFigures]:
    """Yield the device's time of a forward pass of one sequence with drafts."""
    for context in CONTEXTS:
        none_us = 0.0
        for num_drafts in (0, 1, 3, 4, 7, 8, 16):
            step_us = 1e6 * step_seconds(built, context, num_drafts)
            none_us = none_us or step_us
            yield StepFigures(context=context, num_drafts=num_drafts, step_us=step_us, ratio=step_us / none_us)


def step_seconds(built: BuiltEngine, context: int, num_drafts: int) -> float:
    ops, runner, count = built.ops, built.executor.runner, num_drafts + 1
    positions = np.arange(context, context + count, dtype=np.int32)
    block_size = built.memory.block_size
    tables = np.arange(-(-(context + count) // block_size), dtype=np.int32)[None].repeat(count, axis=0)
    inputs = ForwardInputs(
        token_ids=np.zeros(count, np.int32),
        pending_token_row=np.full(count, len(runner.sampled), np.int32),
        positions=positions,
        slots=tables[0, positions // block_size].astype(np.int64) * block_size + positions % block_size,
        context_lens=positions + 1,
        logit_rows=np.arange(count, dtype=np.int32),
        num_decodes=count,
        tables=tables,
        dirty_tables=np.ones(count, np.bool_),
        chunk_lens=np.zeros(0, np.int32),
        chunk_tables=[],
        num_draft_rows=count if num_drafts else 0,
    )
    for _ in range(3):
        runner.launch(StepInputs(forward=inputs, samples=()))
    begin = ops.record_event()
    for _ in range(NUM_TIMED):
        runner.launch(StepInputs(forward=inputs, samples=()))
    return ops.elapsed_s(begin, ops.record_event()) / NUM_TIMED


def compare(built: BuiltEngine, cost: StepCost, batch: int) -> Iterator[RunFigures]:
    token_id = emitted_token(built)
    before = run(built, cost, batch, None)
    drafted = {}
    for rate in RATES:
        drafted[f"free {rate}"] = run(built, cost, batch, ForcedDrafter(token_id, rate))
    after = run(built, cost, batch, None)
    none = (before.tokens_per_s + after.tokens_per_s) / 2
    yield _figures(batch, "none", before, none)
    for name, figures in drafted.items():
        yield _figures(batch, name, figures, none)
    random_before = run(built, cost, batch, None, temperature=1.0)
    found_nothing = run(built, cost, batch, NgramDrafter(2, 5), temperature=1.0)
    random_after = run(built, cost, batch, None, temperature=1.0)
    random_none = (random_before.tokens_per_s + random_after.tokens_per_s) / 2
    yield _figures(batch, "ngram, random text", found_nothing, random_none)


def _figures(batch: int, name: str, totals: RunTotals, none: float) -> RunFigures:
    return RunFigures(
        batch=batch,
        drafts=name,
        tokens_per_s=totals.tokens_per_s,
        ratio=totals.tokens_per_s / none,
        step_ms=1e3 * totals.step_s,
        drafted=totals.drafted,
        accepted=totals.accepted,
    )


def emitted_token(built: BuiltEngine) -> int:
    engine = built.engine
    sampling = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    engine.add_request(EngineRequest(request_id="token", prompt=(1, 2, 3), sampling=sampling))
    tokens: list[int] = []
    while engine.has_work:
        engine.step()
        tokens += [
            token for output in engine.drain_request_outputs() for part in output.parts for token in part.token_ids
        ]
    if len(set(tokens)) != 1:
        raise AssertionError(f"a head of zeros emits several tokens: {tokens}")
    return tokens[0]


@contextmanager
def drafting(built: BuiltEngine, drafter, cost: StepCost | None) -> Iterator[None]:
    """Replace the engine's drafts; no drafter: no speculation at all; no cost: as many drafts as there are."""
    engine, speculation = built.engine, None
    if drafter is not None:
        lengths = DraftLengths(copy.deepcopy(cost))
        speculation = Speculation(engine._kv, built.config.vocab_size, drafter, MAX_DRAFTS, lengths)
    with patch.object(engine, "speculation", speculation), patch.object(engine._scheduler, "speculation", speculation):
        yield


def run(
    built: BuiltEngine, cost: StepCost | None, batch: int, drafter, temperature: float = 0.0, *, least_steps: int = 1
) -> RunTotals:
    """Decode NUM_TOKENS tokens a sequence, as often as `least_steps` steps take: contexts are those without drafts."""
    totals = RunTotals(batch=batch)
    with drafting(built, drafter, cost):
        while len(totals.step_tokens) < least_steps:
            totals = _run_once(built, totals, drafter, temperature)
    return totals


def _run_once(built: BuiltEngine, totals: RunTotals, drafter, temperature: float) -> RunTotals:
    """Add a run, timed while all sequences decode."""
    engine, batch, rng = built.engine, totals.batch, random.Random(totals.batch)
    for number in range(batch):
        prompt = tuple(rng.choices(range(10, 4000), k=PROMPT_TOKENS))
        sampling = SamplingParams(
            max_tokens=max(CONTEXTS) - PROMPT_TOKENS, temperature=temperature, seed=number, ignore_eos=True
        )
        engine.add_request(EngineRequest(request_id=str(number), prompt=prompt, sampling=sampling))
    while any(sequence.num_output_tokens < 8 for sequence in engine.running) or len(engine.running) < batch:
        engine.step()
        engine.drain_outputs()
    outputs = engine._output_processor
    before, marks, start_s = engine.stats(), [outputs.num_tokens], time.perf_counter()
    while marks[-1] < marks[0] + batch * NUM_TOKENS:
        engine.step()
        engine.drain_outputs()
        marks.append(outputs.num_tokens)
    seconds, after = time.perf_counter() - start_s, engine.stats()
    engine.cancel_all(EndReason.CANCELLED)
    while engine.has_work:
        engine.step()
        engine.drain_outputs()
    if drafter is not None:
        num_drafted = after.num_draft_tokens - before.num_draft_tokens
        num_accepted = after.num_accepted_tokens - before.num_accepted_tokens
        totals = replace(
            totals,
            num_drafted=totals.num_drafted + num_drafted,
            num_accepted=totals.num_accepted + num_accepted,
        )
    step_tokens = tuple(np.diff(marks).tolist())
    return replace(totals, seconds=totals.seconds + seconds, step_tokens=totals.step_tokens + step_tokens)


def _text(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    run_script(main)
