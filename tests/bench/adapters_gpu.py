"""Steps and loads of LoRA adapters: `python -m tests.bench.adapters_gpu` takes about a minute on a GPU.

1. A decode of `--sequences` over `--adapters` against the same of the base model, in one engine with --enable-lora.
2. The base model's decode in that engine against one without --enable-lora, in turns.
3. A decode during which a short request arrives every EVERY steps, in turn with an adapter in a slot and with one from
   disk: the gaps between tokens by what happens meanwhile, and the times from the start of a read
   to its end, to the end of the copies and to a written slot. Turns share the contexts, which grow.

`--folder` should be in memory or the page cache. Rank and shape are those of `--model-config` with random weights.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from itertools import cycle
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from model.config import ModelConfig
from model.sampling_params import SamplingParams
from model.weights.lora.adapter import read_adapter
from service.cli.models import DEMO_MODEL
from service.config.settings import Settings
from service.engine.build import BuiltEngine, build_engine
from service.engine.request import AdapterSource, EngineRequest
from service.errors import EndReason
from service.garbage import freeze_heap
from tests.support.adapters import write_adapter

EVERY = 20
"""Steps between requests that need an adapter."""

TURNS = 3
UNTIMED_STEPS = 5
"""Figures at the start of a turn."""

SETTLING_STEPS = 200
STARTING_STEPS = 128
"""Steps within which all prompts are computed."""


_BEGIN_S = time.perf_counter()


def report(text: str) -> None:
    """Print progress with the seconds since the start."""
    print(f"{time.perf_counter() - _BEGIN_S:.1f} s: {text}", flush=True)


class Run:
    """An engine with sequences that decode until `stop`."""

    def __init__(self, built: BuiltEngine, flags: argparse.Namespace):
        self.engine, self._built, self._flags = built.engine, built, flags
        self._num_tokens = built.limits.max_model_len - flags.context
        self._num_requests = 0

    def add(self, prompt: int, num_tokens: int, source: AdapterSource | None = None) -> None:
        self._num_requests += 1
        random = np.random.default_rng(self._num_requests)
        tokens = tuple(random.integers(0, self._built.config.vocab_size, prompt).tolist())
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        request = EngineRequest(request_id=str(self._num_requests), prompt=tokens, sampling=params, adapter=source)
        self.engine.add_request(request)

    def load(self, sources: list[AdapterSource]) -> None:
        """Bring adapters to slots: sequences that wait for them would start later than others."""
        for source in sources:
            self.add(16, 2, source)
        while self.engine.has_work:
            self.step()

    def start(self, sources: list[AdapterSource]) -> None:
        """Start `--sequences`, and step until all decode."""
        count = self._flags.sequences
        for number in range(count):
            source = sources[number % len(sources)] if sources else None
            self.add(self._flags.context, self._num_tokens, source)
        while len(self.engine.running) < count or any(one.num_output_tokens < 2 for one in self.engine.running):
            self.step()

    def stop(self) -> None:
        assert len(self.engine.running) >= self._flags.sequences, "sequences have ended while steps were timed"
        self.engine.cancel_all(EndReason.CANCELLED)
        while self.engine.has_work:
            self.engine.step()
        self.engine.drain_outputs()

    def step(self) -> None:
        self.engine.step()
        self.engine.drain_outputs()

    def mean_tokens(self) -> float:
        """Return the tokens that a sequence has."""
        return self.engine.stats().num_slots_filled / self._flags.sequences

    def step_ms(self, num_steps: int) -> float:
        for _ in range(UNTIMED_STEPS):
            self.step()
        begin_s = time.perf_counter()
        for _ in range(num_steps):
            self.step()
        return 1e3 * (time.perf_counter() - begin_s) / num_steps

    def gaps_ms(self, source: AdapterSource) -> list[tuple[str, float]]:
        """Step EVERY times after a request of an adapter; return gaps and what happened meanwhile."""
        gaps = []
        self.add(16, 2, source)
        for _ in range(EVERY):
            was_loading, had_adapter, begin_s = self._is_loading, self._has_adapter, time.perf_counter()
            self.step()
            gap_ms = 1e3 * (time.perf_counter() - begin_s)
            has_adapter = had_adapter or self._has_adapter
            gaps.append(("with an adapter" if has_adapter else "loading" if was_loading else "base", gap_ms))
        self.settle()
        return gaps

    def settle(self) -> None:
        """Step until the short requests have ended."""
        while self._is_loading or self._has_adapter:
            self.step()

    @property
    def _has_adapter(self) -> bool:
        return len(self.engine.running) > self._flags.sequences

    @property
    def _is_loading(self) -> bool:
        return self.engine._adapters is not None and self.engine._adapters.is_loading


class LoadTimes:
    """Times from the start of a read to its end, to the end of the copies and to a written slot that the engine has
    noticed."""

    def __init__(self, run: Run):
        adapters = run.engine._adapters
        assert adapters is not None
        self.read_ms: list[float] = []
        self.copied_ms: list[float] = []
        self.ready_ms: list[float] = []
        begun_s: dict[str, float] = {}
        read, write, finish = adapters._read, adapters._write, adapters.slots.finish_load
        digests: dict[int, str] = {}

        def timed_read(source):
            begun_s[source.digest] = time.perf_counter()
            adapter = read(source)
            self.read_ms.append(1e3 * (time.perf_counter() - begun_s[source.digest]))
            return adapter

        def since_begin_ms(slot):
            return 1e3 * (time.perf_counter() - begun_s[digests[slot]])

        def noted_write(slot, adapter, **how):
            digests[slot] = adapter.digest
            started = write(slot, adapter, **how)
            if isinstance(copied := getattr(started, "_copied", None), Future):
                copied.add_done_callback(lambda _: self.copied_ms.append(since_begin_ms(slot)))
            return started

        def timed_finish(slot):
            self.ready_ms.append(since_begin_ms(slot))
            finish(slot)

        adapters._read, adapters._write, adapters.slots.finish_load = timed_read, noted_write, timed_finish


def make_adapters(folder: Path, config: ModelConfig, dtype: np.dtype, rank: int, count: int) -> list[AdapterSource]:
    """Return adapters that differ in lora_alpha and share their tensors' file."""
    first = write_adapter(folder / "0", config, rank=rank, dtype=dtype, strength=0.1).folder
    fields = json.loads((first / "adapter_config.json").read_text())

    def folder_of(number: int) -> Path:
        own = folder / str(number)
        if number:
            own.mkdir()
            os.link(first / "adapter_model.safetensors", own / "adapter_model.safetensors")
            (own / "adapter_config.json").write_text(json.dumps({**fields, "lora_alpha": 16 + number}))
        return own

    folders = list(map(folder_of, range(count)))
    with ProcessPoolExecutor(8, get_context("spawn")) as processes:
        digests = processes.map(partial(_digest, config, dtype, rank), folders)
        return [
            AdapterSource(name=folder.name, path=str(folder), digest=digest)
            for folder, digest in zip(folders, digests, strict=True)
        ]


def _digest(config: ModelConfig, dtype: np.dtype, rank: int, folder: Path) -> str:
    return read_adapter(folder, config, dtype, rank).digest


def settings_of(flags: argparse.Namespace, num_steps: int, **lora) -> Settings:
    """Return settings of an engine whose sequences decode for `num_steps`."""
    block_size, max_len = 16, flags.context + STARTING_STEPS + num_steps
    blocks = 4 + (flags.sequences + 2) * -(-max_len // block_size)
    model = {"model": DEMO_MODEL} if flags.model_config is None else {"model_config": flags.model_config}
    return Settings(
        **model,
        load_format="safetensors" if flags.model_config is None else "dummy",
        device=flags.device,
        dtype="bfloat16" if flags.device == "cuda" else "float32",
        quantization=flags.quantization,
        max_model_len=max_len,
        max_num_seqs=flags.sequences + 2,
        num_gpu_blocks=blocks,
        block_size=block_size,
        swap_space=0.0,
        enable_prefix_caching=False,
        **lora,
    )


def compare_steps(with_lora: Run, without: Run, sources: list[AdapterSource], num_steps: int) -> dict[str, float]:
    """Return milliseconds of a step: medians of turns at the same contexts."""
    without.start([])
    with_lora.start([])
    report("both engines decode")
    turns = [(without.step_ms(num_steps), with_lora.step_ms(num_steps)) for _ in range(TURNS)]
    num_base_tokens = with_lora.mean_tokens()
    with_lora.stop()
    without.stop()
    report(f"base steps: {turns}")
    with_lora.load(sources)
    report("all adapters are in slots")
    with_lora.start(sources)
    of_adapters = [with_lora.step_ms(num_steps) for _ in range(TURNS)]
    report(f"tokens of a sequence at the end: {num_base_tokens:.0f} and {with_lora.mean_tokens():.0f} with adapters")
    with_lora.stop()
    times = {"without --enable-lora": [one for one, _ in turns], "base requests": [one for _, one in turns]}
    times["adapters"] = of_adapters
    medians = {name: float(np.median(own)) for name, own in times.items()}
    for name, own in times.items():
        print(f"{name}: {medians[name]:.3f} ms a step of {[round(each, 3) for each in own]}")
    base = medians["base requests"]
    print(f"adapters / base: {medians['adapters'] / base:.3f} (goal: 1.15 with 64 sequences over 32 of rank 16)")
    print(f"base with / without --enable-lora: {base / medians['without --enable-lora']:.3f} (goal: 1.01)", flush=True)
    return medians


def compare_loads(run: Run, resident: list[AdapterSource], new: list[AdapterSource], num_steps: int) -> None:
    """Use adapters that are in slots, and in turn each of `new` once."""
    run.start([])
    for source in resident:
        run.add(16, 2, source)
    for _ in range(SETTLING_STEPS):
        run.step()
    run.settle()
    report("half of the adapters are in slots")
    times = LoadTimes(run)
    in_slots, from_disk = [], []
    for known, unknown in zip(cycle(resident), new, strict=False):
        num_before = len(times.ready_ms)
        in_slots += run.gaps_ms(known)
        assert len(times.ready_ms) == num_before, "a resident adapter was loaded"
        from_disk += run.gaps_ms(unknown)
    run.stop()
    p99_ms = [_report_gaps("adapters in slots", in_slots), _report_gaps("adapters from disk", from_disk)]
    print(f"p99 from disk / in slots: {p99_ms[1] / p99_ms[0]:.3f} (goal: 1.05)")
    for name, own in (("read", times.read_ms), ("copied", times.copied_ms), ("ready", times.ready_ms)):
        if own:
            print(f"{name}: median {np.median(own):.1f} ms, {max(own):.1f} at most, of {len(own)} loads")
    print("goal: ready within 50 ms for rank 16 of Llama-3.1-8B")


def _report_gaps(name: str, gaps: list[tuple[str, float]]) -> float:
    """Print gaps in ms, of all steps and by state; return their p99."""
    by_state = {state: [gap for own, gap in gaps if own == state] for state in sorted({state for state, _ in gaps})}
    for title, own in ((name, [gap for _, gap in gaps]), *((f"  {state}", own) for state, own in by_state.items())):
        p50, p99, most = np.percentile(own, [50, 99, 100])
        count, mean = len(own), np.mean(own)
        print(f"{title}: {count} gaps of {p50:.2f} ms at the median, {mean:.2f} mean, {p99:.2f} p99, {most:.2f} most")
    return float(np.percentile([gap for _, gap in gaps], 99))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-config", default="llama-3.1-8b", help="a preset shape")
    parser.add_argument("--demo", action="store_true", help="use the demo model in its place")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--adapters", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=100, help="steps of each of three turns; 0: loads only")
    parser.add_argument("--load-steps", type=int, default=600, help="steps of each kind; 0: no loads")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    flags = parser.parse_args()
    if flags.demo:
        flags.model_config = None
    lora = {"enable_lora": True, "max_loras": flags.adapters, "max_lora_rank": flags.rank}
    num_timed_steps = TURNS * (UNTIMED_STEPS + flags.steps)
    num_steps = max(3 * SETTLING_STEPS + 2 * flags.load_steps, num_timed_steps)
    with_lora = build_engine(settings_of(flags, num_steps, **lora), progress=True)
    without = build_engine(settings_of(flags, num_timed_steps), progress=True) if flags.steps else None
    freeze_heap()
    report("the engines have started")
    folder = Path(TemporaryDirectory(dir=flags.folder).name)
    try:
        num_loads = -(-flags.load_steps // EVERY)
        sources = make_adapters(folder, with_lora.config, with_lora.ops.dtype, flags.rank, flags.adapters + num_loads)
        report(f"{len(sources)} adapters are written")
        known, new = sources[: flags.adapters], sources[flags.adapters :]
        run = Run(with_lora, flags)
        if without is not None:
            compare_steps(run, Run(without, flags), known, flags.steps)
        if flags.load_steps:
            compare_loads(run, known[: flags.adapters // 2], new, flags.load_steps)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
