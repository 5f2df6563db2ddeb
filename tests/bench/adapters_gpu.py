"""Steps and loads of LoRA adapters: `python -m tests.bench.adapters_gpu` takes about a minute on a GPU.

1. A decode of `--sequences` over `--adapters` against the same of the base model, in one engine with --enable-lora.
2. The base model's decode in that engine against one without --enable-lora, in turns.
3. A decode during which a short request arrives every EVERY steps, with adapters that are in a slot and then with ones
   that are read from disk: the gaps between tokens, and the time from a request to a written slot.

`--folder` should be in memory or the page cache. Rank and shape are those of `--model-config` with random weights.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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

    def gaps_ms(self, sources: Iterator[AdapterSource], num_steps: int) -> np.ndarray:
        """Step with a request of the next adapter every EVERY steps."""
        ends_s = [time.perf_counter()]
        for number in range(num_steps):
            if number % EVERY == 0:
                self.add(16, 2, next(sources))
            self.step()
            ends_s.append(time.perf_counter())
        return 1e3 * np.diff(ends_s)


class LoadTimes:
    """Times of reads, and from the start of a read to a written slot."""

    def __init__(self, run: Run):
        adapters = run.engine._adapters
        assert adapters is not None
        self.read_ms: list[float] = []
        self.ready_ms: list[float] = []
        begun_s: dict[str, float] = {}
        read, write, finish = adapters._read, adapters._write, adapters.slots.finish_load
        digests: dict[int, str] = {}

        def timed_read(source):
            begun_s[source.digest] = time.perf_counter()
            adapter = read(source)
            self.read_ms.append(1e3 * (time.perf_counter() - begun_s[source.digest]))
            return adapter

        def noted_write(slot, adapter):
            digests[slot] = adapter.digest
            return write(slot, adapter)

        def timed_finish(slot):
            self.ready_ms.append(1e3 * (time.perf_counter() - begun_s[digests[slot]]))
            finish(slot)

        adapters._read, adapters._write, adapters.slots.finish_load = timed_read, noted_write, timed_finish


def make_adapters(folder: Path, config: ModelConfig, dtype: np.dtype, rank: int, count: int) -> list[AdapterSource]:
    """Return adapters that differ in lora_alpha and share their tensors' file."""
    first = write_adapter(folder / "0", config, rank=rank, dtype=dtype, strength=0.1).folder
    fields = json.loads((first / "adapter_config.json").read_text())

    def source_of(number: int) -> AdapterSource:
        own = folder / str(number)
        if number:
            own.mkdir()
            os.link(first / "adapter_model.safetensors", own / "adapter_model.safetensors")
            (own / "adapter_config.json").write_text(json.dumps({**fields, "lora_alpha": 16 + number}))
        digest = read_adapter(own, config, dtype, rank).digest
        return AdapterSource(name=str(number), path=str(own), digest=digest)

    with ThreadPoolExecutor(8) as threads:
        return list(threads.map(source_of, range(count)))


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
    """Use adapters that are in slots, and then each of `new` once."""
    run.start([])
    for source in resident:
        run.add(16, 2, source)
    for _ in range(SETTLING_STEPS):
        run.step()
    report("half of the adapters are in slots")
    times = LoadTimes(run)
    known = run.gaps_ms(iter(resident * (num_steps // EVERY + 1)), num_steps)
    num_before = len(times.ready_ms)
    loaded = run.gaps_ms(iter(new), num_steps)
    run.stop()
    assert num_before == 0, "a resident adapter was loaded"
    for name, gaps in (("adapters in slots", known), ("adapters from disk", loaded)):
        p50, p99, most = np.percentile(gaps, [50, 99, 100])
        print(f"{name}: gaps of {p50:.2f} ms at the median, {p99:.2f} at p99, {most:.2f} at most")
    print(f"p99 from disk / in slots: {np.percentile(loaded, 99) / np.percentile(known, 99):.3f} (goal: 1.05)")
    for name, own in (("read", times.read_ms), ("ready", times.ready_ms)):
        print(f"{name}: median {np.median(own):.1f} ms, {max(own):.1f} at most, of {len(own)} loads")
    print("goal: ready within 50 ms for rank 16 of Llama-3.1-8B")


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
    parser.add_argument("--steps", type=int, default=100, help="steps of each of three turns")
    parser.add_argument("--load-steps", type=int, default=600, help="0: no loads")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    flags = parser.parse_args()
    if flags.demo:
        flags.model_config = None
    lora = {"enable_lora": True, "max_loras": flags.adapters, "max_lora_rank": flags.rank}
    num_timed_steps = TURNS * (UNTIMED_STEPS + flags.steps)
    num_steps = max(SETTLING_STEPS + 2 * flags.load_steps, num_timed_steps)
    with_lora = build_engine(settings_of(flags, num_steps, **lora), progress=True)
    report("the engine with adapters has started")
    without = build_engine(settings_of(flags, num_timed_steps), progress=True)
    report("the engine without adapters has started")
    freeze_heap()
    folder = Path(TemporaryDirectory(dir=flags.folder).name)
    try:
        num_loads = -(-flags.load_steps // EVERY)
        sources = make_adapters(folder, with_lora.config, with_lora.ops.dtype, flags.rank, flags.adapters + num_loads)
        report(f"{len(sources)} adapters are written")
        known, new = sources[: flags.adapters], sources[flags.adapters :]
        run = Run(with_lora, flags)
        compare_steps(run, Run(without, flags), known, flags.steps)
        if flags.load_steps:
            compare_loads(run, known[: flags.adapters // 2], new, flags.load_steps)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
