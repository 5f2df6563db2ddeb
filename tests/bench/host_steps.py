"""Microseconds of the host's part of a step, without a device: plan, build, collect and output.

    python -m tests.bench.host_steps [--batch 512] [--context 1000] [--steps 200] [--drafts 8] [--out FILE]

Scheduler, KV manager, engine and executor are real; the device takes no time and samples zeros. Copies and launches on
a GPU are not in these figures. With `--drafts N`, each decode has N, of which DRAFT_RATE are right, and a step is
exposed from the arrival of its tokens to the launch of the next.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace

import numpy as np

from model.ops.cpu.ops import NumpyOps
from model.ops.interface import Array, Sampled, SamplingArrays
from model.presets import PRESETS
from model.sampling_params import SamplingParams
from service.bench.engine_measures import WHOLE_STEPS
from service.bench.flag_values import whole_number
from service.bench.report import add_report_flags, check_report_flags, run_script, write_report
from service.cli.table import print_grid
from service.engine.drafting.drafter import EAGLE3
from service.engine.engine import Engine
from service.engine.execution.executor import ModelExecutor
from service.engine.kv.kv_manager import KVManager
from service.engine.output_processor import iter_request_outputs
from service.engine.request import EngineRequest
from service.engine.scheduling.limits import Limits
from service.engine.scheduling.scheduler import Scheduler
from service.engine.scheduling.speculation import Speculation
from service.garbage import freeze_heap
from service.queue.codec import encode
from service.worker.events import event_of

BLOCK_SIZE = 16
VOCAB_SIZE = 4096
WARM_STEPS = 8
DRAFT_RATE = 0.8
ARRIVING_PROMPT = 256
"""Prompt tokens that join each mixed step; the short answer keeps the batch constant."""


class IdleOps(NumpyOps):
    """Device that runs ahead, replays graphs and does nothing."""

    name = "cuda"
    arrived_s = exposed_s = 0.0
    """Time when the last tokens arrived; the exposed time runs from there to the next launch."""

    def capture(self, work: Callable[[], None], warm_up_run: Callable[[], None] | None = None) -> Callable[[], None]:
        return self._replay

    def _replay(self) -> None:
        self.exposed_s = time.thread_time() - self.arrived_s

    def download_async(self, arrays: Sequence[Array]) -> Callable[[], list[np.ndarray]]:
        fetch = super().download_async(arrays)

        def fetched() -> list[np.ndarray]:
            self.arrived_s = time.thread_time()
            return fetch()

        return fetched

    def pick_tokens(self, token_ids: Array, sampled: Array, source: Array) -> None:
        pass

    def sample(self, logits: Array, how: SamplingArrays, out: Array | None = None) -> Sampled:
        num_rows = len(how.temperature)
        return Sampled(np.zeros(num_rows, np.int32), np.zeros(num_rows, np.bool_), None, None, None)


class SometimesRight:
    """Drafter of the zeros that the device samples."""

    source, writes_cache, token_s = EAGLE3, True, 0.0

    def __init__(self) -> None:
        self._numbers = random.Random(1)

    def draft(self, sequences, max_tokens):
        return [tuple(int(self._numbers.random() > DRAFT_RATE) for _ in range(count)) for count in max_tokens]

    def on_end(self, sequence) -> None:
        """Keep nothing."""


@dataclass(frozen=True, kw_only=True)
class HostFigures:
    """Medians over steps, in microseconds of this thread's CPU time."""

    case: str
    schedule_us: float
    launch_us: float  # arrays of forward pass and sampling, packed
    settle_us: float  # collect, update sequences, outputs
    step_us: float  # sum
    exposed_us: float  # from the arrival of tokens to the next launch; hidden by the device where steps overlap
    report_us: float  # outputs to encoded events, on the I/O thread


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch", default="512", help="decoding sequences (default: 512)")
    parser.add_argument("--context", default="1000", help="tokens that each holds (default: 1000)")
    parser.add_argument("--steps", default="200", help="measured steps (default: 200)")
    parser.add_argument("--drafts", type=int, default=0, help="drafts of a decode (default: 0)")
    add_report_flags(parser)
    flags = parser.parse_args()
    check_report_flags(flags)
    sizes = [whole_number(f"--{name}", getattr(flags, name)) for name in ("batch", "context", "steps")]
    rows = [
        measure(*sizes, prefix_caching=prefix_caching, mixed=mixed, num_drafts=flags.drafts)
        for prefix_caching in (False, True)
        for mixed in (False, True)
    ]
    heads = ["case", "schedule us", "launch us", "settle us", "step us", "exposed us", "report us"]
    print_grid(heads, [[row.case, *(f"{us:,.0f}" for us in list(vars(row).values())[1:])] for row in rows])
    bars = [
        {"label": part, "x": [row.case for row in rows], "y": [getattr(row, f"{part}_us") for row in rows]}
        for part in ("schedule", "launch", "settle")
    ]
    panel = {"kind": "stack", "title": "the host's part of a step", "x": "", "y": "us", "series": bars}
    batch, context, num_steps = sizes
    record = {"bench": "host_steps", "context": context, "num_steps": num_steps, "steps": [asdict(row) for row in rows]}
    write_report(flags, record, {"title": f"{batch} decodes, no device", "panels": [panel]})


def measure(
    batch: int, context: int, num_steps: int, *, prefix_caching: bool, mixed: bool, num_drafts: int = 0
) -> HostFigures:
    """Time steps of `batch` decodes, with `mixed` also of a short prompt."""
    max_tokens = (num_steps + 2 * WARM_STEPS) * (1 + num_drafts)
    engine, executor = make_engine(batch, context + max_tokens, prefix_caching=prefix_caching, num_drafts=num_drafts)
    numbers = random.Random(0)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.7, ignore_eos=True)
    for number in range(batch):
        prompt = tuple(numbers.choices(range(VOCAB_SIZE), k=context))
        engine.add_request(EngineRequest(request_id=f"{number:032x}/1", prompt=prompt, sampling=params))
    for _ in range(WARM_STEPS):
        engine.step()
        engine.drain_request_outputs()
    freeze_heap()
    courses: list[tuple[float, ...]] = []
    with _timed(engine, executor) as spent_s:
        for number in range(num_steps):
            if mixed:
                prompt = tuple(numbers.choices(range(VOCAB_SIZE), k=ARRIVING_PROMPT))
                short = replace(params, max_tokens=1)
                engine.add_request(EngineRequest(request_id=f"{number + batch:032x}/1", prompt=prompt, sampling=short))
            spent_s.update(schedule=0.0, launch=0.0)
            begin_s = time.thread_time()
            engine.step()
            outputs = engine.drain_outputs()
            step_s = time.thread_time() - begin_s
            begin_s = time.thread_time()
            for output in iter_request_outputs(outputs):
                encode(event_of(output.request_id, number + 1, [output]))
            report_s = time.thread_time() - begin_s
            schedule_s, launch_s = spent_s["schedule"], spent_s["launch"]
            exposed_s = executor.model.ops.exposed_s
            courses.append((schedule_s, launch_s, step_s - schedule_s - launch_s, step_s, exposed_s, report_s))
    medians = [1e6 * statistics.median(column) for column in zip(*courses, strict=True)]
    drafted = f" with {num_drafts} drafts" if num_drafts else ""
    case = f"{batch} decodes{drafted}{' and a prompt' if mixed else ''}, cache {'on' if prefix_caching else 'off'}"
    names = ("schedule_us", "launch_us", "settle_us", "step_us", "exposed_us", "report_us")
    return HostFigures(case=case, **dict(zip(names, medians, strict=True)))


def make_engine(batch: int, longest: int, *, prefix_caching: bool, num_drafts: int = 0) -> tuple[Engine, ModelExecutor]:
    """Return an engine on an idle device with room for all."""
    ops = IdleOps(np.dtype(np.float32))
    max_num_seqs, max_blocks = batch + 16, -(-(longest + ARRIVING_PROMPT) // BLOCK_SIZE) + 1
    config = replace(PRESETS["llama-3.1-8b"], vocab_size=VOCAB_SIZE)
    weights = SimpleNamespace(lm_head=SimpleNamespace(data=None))
    model = SimpleNamespace(ops=ops, config=config, weights=weights, tune=lambda *sizes: None, forward=_forward)
    model.first_layer = lambda: model
    model.hidden = lambda batch, kv, *states: np.zeros((batch.num_tokens, 1), np.float32)
    model.logits = lambda hidden, rows: np.zeros((len(hidden if rows is None else rows), VOCAB_SIZE), np.float32)
    executor = ModelExecutor(model, frozenset(), max_num_seqs, max_blocks, verifies_drafts=num_drafts > 0)
    num_blocks = max_num_seqs * max_blocks
    executor.attach(np.zeros((1, 1, 1, 1, BLOCK_SIZE, 1), np.float32))
    kv = KVManager(num_blocks, BLOCK_SIZE, prefix_caching=prefix_caching)
    limits = Limits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=WHOLE_STEPS,
        max_prefill_chunk=WHOLE_STEPS,
        max_model_len=max_blocks * BLOCK_SIZE,
        max_decode_rows=executor.max_rows,
    )
    speculation = Speculation(kv, VOCAB_SIZE, SometimesRight(), num_drafts) if num_drafts else None
    return Engine(executor, Scheduler(kv, limits, speculation=speculation), frozenset()), executor


def _forward(batch, kv: Array, out: Array | None = None) -> Array:
    return np.zeros((batch.num_sequences, VOCAB_SIZE), np.float32)


@contextmanager
def _timed(engine: Engine, executor: ModelExecutor) -> Iterator[dict[str, float]]:
    """Add up the seconds of planning and launching by name."""
    spent_s: dict[str, float] = {}

    def watch(owner: object, method: str) -> None:
        work = getattr(owner, method)

        def timed(*args):
            begin_s = time.thread_time()
            try:
                return work(*args)
            finally:
                spent_s[method] += time.thread_time() - begin_s

        setattr(owner, method, timed)

    scheduler = engine._scheduler
    watch(scheduler, "schedule")
    watch(executor, "launch")
    try:
        yield spent_s
    finally:
        del scheduler.schedule, executor.launch


if __name__ == "__main__":
    run_script(main)
