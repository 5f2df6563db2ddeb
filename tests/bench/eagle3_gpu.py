"""Output tokens a second with an EAGLE-3 head on a device, over none, each draft right at a forced rate.

    python -m tests.bench.eagle3_gpu [--model-config llama-3.1-8b] [--batch 1,16] [--rates 0.6,0.8] [--out FILE]

Weights are random, the head's of the published shape for the model. The model's head is zero: greedy sampling emits one
token for ever. Drafts are drawn as in service, and replaced by that token or a wrong one before they are verified. How
many are right in a row is dealt from shuffled decks that hold each number in its expected share.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np

from model.presets import PRESETS
from service.bench.flag_values import whole_number
from service.bench.report import add_report_flags, check_report_flags, run_script, write_report
from service.cli.table import print_grid
from service.config.settings import Settings
from service.config.speculative import SpeculativeConfig
from service.engine.build import BuiltEngine, build_engine
from service.engine.drafting.build import step_cost
from service.engine.drafting.lengths import DraftLengths, StepCost
from service.engine.scheduling.speculation import Speculation
from tests.bench.speculation_gpu import CONTEXTS, RunTotals, emitted_token, run

MAX_DRAFTS = 8
DRAFT_VOCAB = 32_000
DECK = 50
LEAST_STEPS = 1000
"""Steps of a run with drafts, over all sequences."""


class ForcedGraphs:
    """Drafts of a head, replaced on the device: each is right with a chance of `rate`, if those before it are."""

    def __init__(self, graphs, ops, token_id: int, rate: float):
        self._graphs, self._ops, self._token_id, self._rate = graphs, ops, token_id, rate
        self._rng = np.random.default_rng(0)
        self._lengths = np.zeros(0, np.int64)

    def __getattr__(self, name: str):
        return getattr(self._graphs, name)

    def draft(self, *how):
        drafts = self._graphs.draft(*how)
        number = np.arange(len(drafts))[:, None]
        forced = self._token_id + (number >= self._dealt(drafts.shape[1])).astype(np.int32)
        self._ops.upload_all([forced], drafts.reshape(-1).view(np.uint8))
        return drafts

    def _dealt(self, count: int) -> np.ndarray:
        """Return int64[count], how many drafts in a row are right."""
        while len(self._lengths) < count:
            chances = (self._rng.permutation(DECK) + 1 - self._rng.random()) / DECK
            with np.errstate(divide="ignore", invalid="ignore"):  # rates of 0 and 1
                lengths = np.abs(np.log(chances) / np.log(self._rate))
            self._lengths = np.append(self._lengths, np.fmin(lengths, MAX_DRAFTS).astype(np.int64))
        dealt, self._lengths = self._lengths[:count], self._lengths[count:]
        return dealt


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    batch: int
    rate: float | None
    tokens_per_s: float
    ratio: float  # to none, the mean of the runs before and after
    step_ms: float
    drafted: float  # per sequence and step
    accepted: float  # of the drafted
    error: float  # standard, of the tokens a step, over their mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model-config", default="llama-3.1-8b", help="shape (default: llama-3.1-8b)")
    parser.add_argument("--device", default="cuda", help="cuda or cpu (default: cuda)")
    parser.add_argument("--quantization", default="auto", help="auto or fp8 (default: auto)")
    parser.add_argument("--batch", default="1,16", help="sequences at once (default: 1,16)")
    parser.add_argument("--rates", default="0.6,0.8", help="chances that a draft is right (default: 0.6,0.8)")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9, help="as of serve (default: 0.9)")
    add_report_flags(parser)
    flags = parser.parse_args()
    check_report_flags(flags)
    batches = [whole_number("--batch", part) for part in flags.batch.split(",")]
    rates = [float(part) for part in flags.rates.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        built = make_engine(flags, Path(folder), max(batches))
    drafter = built.engine.speculation._drafter
    drafts_us = {size: round(1e6 * drafter._graphs.token_s(size)) for size in drafter._graphs._sizes}
    print(f"us a draft, by sequences: {drafts_us}")
    built.ops.load_parallel([built.executor.model.weights.lm_head.data], lambda _, start, out: out.fill(0))
    cost = step_cost(built.executor, built.memory.max_model_len)
    rows: list[RunFigures] = []
    for batch in batches:
        for row in compare(built, drafter, cost, batch, rates):
            print_grid(list(asdict(row)), [[_text(value) for value in asdict(row).values()]])
            rows.append(row)
    record = {
        "bench": "eagle3_gpu",
        "model": flags.model_config,
        "device": built.ops.device_name if flags.device == "cuda" else "cpu",
        "quantization": flags.quantization,
        "drafts_us": drafts_us,
        "runs": [asdict(row) for row in rows],
    }
    series = [
        {"label": str(rate), "x": [str(batch) for batch in batches], "y": [r.ratio for r in rows if r.rate == rate]}
        for rate in rates
    ]
    panel = {"kind": "bars", "title": "output tokens/s over none", "x": "sequences", "y": "ratio", "series": series}
    write_report(flags, record, {"title": flags.model_config, "panels": [panel]})


def make_engine(flags: argparse.Namespace, folder: Path, max_num_seqs: int) -> BuiltEngine:
    (folder / "config.json").write_text(json.dumps(head_config(flags.model_config)))
    settings = Settings(
        model_config=flags.model_config,
        load_format="dummy",
        device=flags.device,
        quantization=flags.quantization,
        max_model_len=max(CONTEXTS) + 64,
        max_num_seqs=max_num_seqs,
        gpu_memory_utilization=flags.gpu_memory_utilization,
        enable_prefix_caching=False,
        speculative_config=SpeculativeConfig(method="eagle3", model=folder, num_speculative_tokens=MAX_DRAFTS),
    )
    return build_engine(settings, progress=False)


def head_config(name: str) -> dict:
    """Return the config of a head with one of the model's own layers."""
    config = PRESETS[name]
    return {
        "speculators_model_type": "eagle3",
        "draft_vocab_size": min(DRAFT_VOCAB, config.vocab_size),
        "transformer_layer_config": {
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "vocab_size": config.vocab_size,
            "max_position_embeddings": config.max_position,
            "rope_theta": 500000.0,
        },
    }


def compare(built: BuiltEngine, drafter, cost: StepCost, batch: int, rates: list[float]) -> Iterator[RunFigures]:
    token_id = emitted_token(built)
    before = measured(built, None, cost, batch)
    drafted = {}
    for rate in rates:
        with patch.object(drafter, "_graphs", ForcedGraphs(drafter._graphs, built.ops, token_id, rate)):
            drafted[rate] = measured(built, drafter, cost, batch)
    after = measured(built, None, cost, batch)
    none = (before.tokens_per_s + after.tokens_per_s) / 2
    for rate, totals in {None: before, **drafted}.items():
        yield RunFigures(
            batch=batch,
            rate=rate,
            tokens_per_s=totals.tokens_per_s,
            ratio=totals.tokens_per_s / none,
            step_ms=1e3 * totals.step_s,
            drafted=totals.drafted,
            accepted=totals.accepted,
            error=totals.error,
        )


def measured(built: BuiltEngine, drafter, cost: StepCost | None, batch: int, max_drafts: int = MAX_DRAFTS) -> RunTotals:
    """Return `run`'s figures; without a drafter, the head reads no states. No cost: always `max_drafts`."""
    engine, speculation = built.engine, None
    if drafter is not None:
        lengths = DraftLengths(copy.deepcopy(cost))
        sizes = engine._kv, built.config.vocab_size, drafter, max_drafts, lengths
        speculation = Speculation(*sizes, num_ahead=max_drafts)

    @contextmanager
    def drafting(*_) -> Iterator[None]:
        with (
            patch.object(engine, "speculation", speculation),
            patch.object(engine._scheduler, "speculation", speculation),
            patch.object(built.executor, "_follower", drafter),
        ):
            yield

    with patch("tests.bench.speculation_gpu.drafting", drafting):
        least_steps = 1 if drafter is None else -(-LEAST_STEPS // batch)
        return run(built, cost, batch, drafter, least_steps=least_steps)


def _text(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    run_script(main)
