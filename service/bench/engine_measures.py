"""Measurements of `quire bench engine`: a trace at once, steady decode steps, prompts at once, shared prefixes."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np

from model.batch import Batch
from model.ops.group.device import GroupDevice
from model.ops.group.turns import in_turn
from model.ops.interface import Array, Device
from model.sampling_params import SamplingParams
from service.bench.attention_probe import AttentionProbe
from service.bench.trace import TracedRequest
from service.engine.build import BuiltEngine
from service.engine.request import EngineRequest
from service.errors import EndReason, StartupError

WARM_STEPS = 8
"""Decode steps before the first timed one, to build kernels and capture graphs."""

WHOLE_STEPS = 1 << 20
"""A prefill chunk larger than any step's budget."""

PREFILL_ROUNDS = 3

FIRST_LOOK = 4
LOOK_EVERY = 64
"""Steps between untimed looks at the cache."""


@dataclass(frozen=True, slots=True)
class Step:
    seconds: float
    num_tokens: int  # output tokens
    num_running: int


@dataclass(frozen=True, kw_only=True)
class TraceFigures:
    """A trace run at once, by wall-clock time of whole steps."""

    num_requests: int
    num_shortened: int  # requests with prompts cut to the engine's length
    num_prompt_tokens: int
    num_output_tokens: int
    engine_start_s: float
    total_s: float
    output_tokens_per_s: float
    num_steps: int
    step_p50_ms: float
    step_p99_ms: float
    mean_running: float
    attention_gb_per_s: float  # decode attention, measured at each look
    kv_waste_ratio: float  # empty token slots in held blocks, mean over the looks
    num_preemptions: int
    num_swapped: int  # of num_preemptions
    num_blocks_out: int  # to the host
    num_blocks_in: int  # from the host


@dataclass(frozen=True, kw_only=True)
class DecodeFigures:
    """Steps of a full decode batch."""

    batch: int
    mean_context: float  # tokens per sequence, halfway through the timed steps
    num_steps: int
    step_p50_ms: float
    step_p99_ms: float
    step_mean_ms: float
    output_tokens_per_s: float


@dataclass(frozen=True, kw_only=True)
class PrefillFigures:
    num_prompts: int
    prompt_tokens: int  # per prompt
    num_rounds: int
    total_s: float
    prompt_tokens_per_s: float


def measure_trace(
    built: BuiltEngine, requests: Sequence[TracedRequest], *, engine_start_s: float
) -> tuple[TraceFigures, list[Step]]:
    """Run all requests at once to their end. Return the figures and every step.

    Prompts are cut to leave room for the output. Raises StartupError for an output longer than the engine's length.
    """
    engine, longest = built.engine, built.limits.max_model_len
    lengths = [(min(r.num_prompt_tokens, longest - r.num_output_tokens), r.num_output_tokens) for r in requests]
    if min(map(min, lengths)) < 1:
        raise StartupError(f"--trace: it has answers too long for this engine's {longest} tokens a sequence")
    _add(built, lengths)
    probe, before = AttentionProbe(built), engine.stats()
    course, wastes, total_s = _course(built, probe)
    after = engine.stats()
    num_outputs = sum(step.num_tokens for step in course)
    steps_ms = [1e3 * step.seconds for step in course]
    figures = TraceFigures(
        num_requests=len(lengths),
        num_shortened=sum(kept < r.num_prompt_tokens for (kept, _), r in zip(lengths, requests, strict=True)),
        num_prompt_tokens=sum(num_prompt for num_prompt, _ in lengths),
        num_output_tokens=num_outputs,
        engine_start_s=engine_start_s,
        total_s=total_s,
        output_tokens_per_s=num_outputs / total_s,
        num_steps=len(course),
        step_p50_ms=statistics.median(steps_ms),
        step_p99_ms=float(np.percentile(steps_ms, 99)),
        mean_running=statistics.fmean(step.num_running for step in course),
        attention_gb_per_s=probe.gb_per_s,
        kv_waste_ratio=statistics.fmean(wastes) if wastes else 0.0,
        num_preemptions=after.num_preemptions - before.num_preemptions,
        num_swapped=after.num_swapped - before.num_swapped,
        num_blocks_out=after.num_blocks_out - before.num_blocks_out,
        num_blocks_in=after.num_blocks_in - before.num_blocks_in,
    )
    return figures, course


def _course(built: BuiltEngine, probe: AttentionProbe) -> tuple[list[Step], list[float], float]:
    """Return all steps, the waste ratio at each look, and the seconds without looks."""
    course, wastes, looks_s = [], [], 0.0
    start_s = time.perf_counter()
    while built.engine.has_work:
        course.append(_timed_step(built))
        if len(course) % LOOK_EVERY == FIRST_LOOK:
            built.ops.synchronize()  # finish the running step before timing the look
            look_s = time.perf_counter()
            probe.look()
            wastes.append(_waste_ratio(built))
            looks_s += time.perf_counter() - look_s
    return course, wastes, time.perf_counter() - start_s - looks_s


@contextmanager
def steady_decode(
    built: BuiltEngine, batch: int, context: int, num_steps: int, *, computes_prompts: bool = True
) -> Iterator[None]:
    """Keep `batch` sequences decoding, with about `context` tokens each halfway through `num_steps` steps.

    Without `computes_prompts`, whatever the cache contains serves as their keys and values. Prompts should get whole
    steps, or the first sequences have grown before the last begin. Raises StartupError if pool or model length is too
    small.
    """
    num_prompt = max(1, context - WARM_STEPS - num_steps // 2)
    budget = max(1, built.limits.max_num_batched_tokens - batch)  # the first sequences decode while the last prefill
    num_output = math.ceil(batch * num_prompt / budget) + 2 * WARM_STEPS + num_steps
    _expect_room(built, batch, num_prompt + num_output)
    _add(built, [(num_prompt, num_output)] * batch)
    engine = built.engine
    started: set[str] = set()
    with nullcontext() if computes_prompts else _no_prompts(built):
        while len(started) < batch:
            engine.step()
            started |= {output.request_id for output in engine.drain_request_outputs() if output.parts}
    for _ in range(WARM_STEPS):
        _timed_step(built)
    yield
    engine.cancel_all(EndReason.CANCELLED)
    while engine.has_work:
        engine.step()
    engine.drain_request_outputs()


@contextmanager
def _no_prompts(built: BuiltEngine) -> Iterator[None]:
    """Return random logits instead of computing them; equal tokens would choose equal experts."""
    model, ops, num_rows = built.executor.model, built.ops, built.limits.max_num_seqs
    random = ops.upload(np.random.default_rng(0).random((num_rows, model.config.vocab_size), np.float32))
    first_row = itertools.count()

    def no_forward(batch: Batch, kv: Array, out: Array | None = None) -> Array:
        count = batch.num_sequences if batch.logit_rows is None else len(batch.logit_rows)
        first = next(first_row) % (num_rows - count + 1)
        return random[first : first + count]

    vars(model)["forward"] = no_forward
    try:
        yield
        ops.synchronize()
    finally:
        del vars(model)["forward"]


def randomize_cache(built: BuiltEngine) -> None:
    ops, kv = built.ops, built.executor.kv
    assert kv is not None
    numbers = np.random.default_rng(0).standard_normal(1_000_003, np.float32).astype(ops.dtype)
    if isinstance(ops, GroupDevice):
        for number, rank in in_turn(ops.ranks):
            _fill(rank, kv.parts[number], numbers)
    else:
        _fill(ops, kv, numbers)
    ops.synchronize()


def _fill(ops: Device, array: Array, numbers: np.ndarray) -> None:
    flat = array.reshape(-1)
    tile = ops.upload(np.resize(numbers, min(flat.size, 1 << 27)))
    for start in range(0, flat.size, tile.size):
        part = flat[start : start + tile.size]
        part.data.copy_from_device_async(tile.data, part.nbytes, getattr(ops, "stream", None))


def measure_decode(built: BuiltEngine, batch: int, context: int, num_steps: int) -> DecodeFigures:
    """Time `num_steps` steps of `batch` sequences with about `context` tokens each.

    Raises StartupError if pool or model length is too small.
    """
    with steady_decode(built, batch, context, num_steps):
        held_before = built.engine.stats().num_slots_filled
        start_s = time.perf_counter()
        steps = [_timed_step(built) for _ in range(num_steps)]
        total_s = time.perf_counter() - start_s
        held = (held_before + built.engine.stats().num_slots_filled) / 2
    if any(step.num_tokens != batch for step in steps):
        raise StartupError(f"--batch: the steps were not all of {batch} sequences; the pool is too small for them")
    steps_ms = [1e3 * step.seconds for step in steps]
    return DecodeFigures(
        batch=batch,
        mean_context=held / batch,
        num_steps=num_steps,
        step_p50_ms=statistics.median(steps_ms),
        step_p99_ms=float(np.percentile(steps_ms, 99)),
        step_mean_ms=1e3 * total_s / num_steps,
        output_tokens_per_s=batch * num_steps / total_s,
    )


def measure_prefill(built: BuiltEngine, num_prompts: int, length: int) -> tuple[PrefillFigures, list[float]]:
    """Return the figures and each round's seconds. Rounds share no prompt. Raises StartupError."""
    _expect_room(built, num_prompts, length + 1)
    rounds_s = []
    for number in range(1 + PREFILL_ROUNDS):
        _add(built, [(length, 1)] * num_prompts, seed=number)
        start_s = time.perf_counter()
        while built.engine.has_work:
            built.engine.step()
        rounds_s.append(time.perf_counter() - start_s)
        built.engine.drain_request_outputs()
    rounds_s = rounds_s[1:]  # the first round warms up
    total_s = statistics.median(rounds_s)
    figures = PrefillFigures(
        num_prompts=num_prompts,
        prompt_tokens=length,
        num_rounds=PREFILL_ROUNDS,
        total_s=total_s,
        prompt_tokens_per_s=num_prompts * length / total_s,
    )
    return figures, rounds_s


def _expect_room(built: BuiltEngine, num_sequences: int, num_tokens: int) -> None:
    if num_tokens > built.limits.max_model_len:
        raise StartupError(f"engine: {num_tokens} tokens a sequence are more than {built.limits.max_model_len}")
    needed = num_sequences * math.ceil(num_tokens / built.memory.block_size)
    if needed > built.memory.num_blocks:
        raise StartupError(f"engine: that needs {needed} blocks, and the pool has {built.memory.num_blocks}")


def _add(built: BuiltEngine, lengths: Sequence[tuple[int, int]], seed: int = 0) -> None:
    """Add greedy requests with these (prompt, output) lengths."""
    random = np.random.default_rng(seed)
    for number, (num_prompt, num_output) in enumerate(lengths):
        prompt = tuple(random.integers(0, built.config.vocab_size, num_prompt).tolist())
        params = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True)
        built.engine.add_request(EngineRequest(request_id=str(number), prompt=prompt, sampling=params))


def _timed_step(built: BuiltEngine) -> Step:
    start_s = time.perf_counter()
    built.engine.step()
    seconds = time.perf_counter() - start_s
    num_tokens = sum(len(part.token_ids) for output in built.engine.drain_request_outputs() for part in output.parts)
    return Step(seconds, num_tokens, len(built.engine.running))


def _waste_ratio(built: BuiltEngine) -> float:
    stats = built.engine.stats()
    return 1 - stats.num_slots_filled / stats.num_slots_held if stats.num_slots_held else 0.0


NUM_LATER = 8
"""Successive users of one prefix."""


@dataclass(frozen=True, kw_only=True)
class PrefixFigures:
    """Users with a shared prefix: all at once on an empty cache, and one after another."""

    num_users: int
    prefix_tokens: int
    own_tokens: int  # per user, after the prefix
    output_tokens: int  # per user
    total_s: float  # all at once
    computed_prompt_tokens: int  # over all users
    most_blocks_used: int
    first_ttft_ms: float  # one user, uncached prefix
    later_ttft_ms: float  # one user, cached prefix, median
    ttft_ratio: float
    strangers_ttft_ms: float  # all users at once, each with its own uncached prefix, mean
    together_ttft_ms: float  # all users at once, cached prefix, mean
    together_ttft_ratio: float


def measure_prefix(
    built: BuiltEngine, num_users: int, prefix_tokens: int, own_tokens: int, output_tokens: int
) -> PrefixFigures:
    """Measure a shared prefix. Raises StartupError if the engine is too small."""
    _expect_prefix_room(built, num_users, prefix_tokens, own_tokens, output_tokens)
    random, vocab = np.random.default_rng(0), built.config.vocab_size

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(random.integers(0, vocab, count).tolist())

    _run(built, [tokens(prefix_tokens + own_tokens)], 2)  # warm-up
    prefix = tokens(prefix_tokens)
    before = built.engine.stats()
    total_s, _, most_blocks = _run(built, [prefix + tokens(own_tokens) for _ in range(num_users)], output_tokens)
    after = built.engine.stats()
    num_prompt = num_users * (prefix_tokens + own_tokens)
    together_s = _run(built, [prefix + tokens(own_tokens) for _ in range(num_users)], 2)[1]
    strangers_s = _run(built, [tokens(prefix_tokens + own_tokens) for _ in range(num_users)], 2)[1]
    prefix = tokens(prefix_tokens)
    first_s, *later_s = (_run(built, [prefix + tokens(own_tokens)], 2)[1] for _ in range(1 + NUM_LATER))
    return PrefixFigures(
        num_users=num_users,
        prefix_tokens=prefix_tokens,
        own_tokens=own_tokens,
        output_tokens=output_tokens,
        total_s=total_s,
        computed_prompt_tokens=num_prompt - (after.num_hit_tokens - before.num_hit_tokens),
        most_blocks_used=most_blocks,
        first_ttft_ms=1e3 * first_s,
        later_ttft_ms=1e3 * statistics.median(later_s),
        ttft_ratio=first_s / statistics.median(later_s),
        strangers_ttft_ms=1e3 * strangers_s,
        together_ttft_ms=1e3 * together_s,
        together_ttft_ratio=strangers_s / together_s,
    )


def _run(built: BuiltEngine, prompts: Sequence[tuple[int, ...]], num_output: int) -> tuple[float, float, int]:
    """Return (seconds to the end, mean seconds to first token, maximum used blocks)."""
    params = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        built.engine.add_request(EngineRequest(request_id=str(number), prompt=prompt, sampling=params))
    begin_s, most = time.perf_counter(), 0
    first_s: dict[str, float] = {}
    while built.engine.has_work:
        built.engine.step()
        now_s = time.perf_counter() - begin_s
        for output in built.engine.drain_request_outputs():
            first_s.setdefault(output.request_id, now_s)
        most = max(most, built.engine.pool.num_used)
    return time.perf_counter() - begin_s, statistics.fmean(first_s.values()), most


def _expect_prefix_room(built: BuiltEngine, num_users: int, prefix: int, own: int, output: int) -> None:
    if prefix + own + output > built.limits.max_model_len:
        raise StartupError(f"engine: {prefix + own + output} tokens are more than {built.limits.max_model_len}")
    size = built.memory.block_size
    needed = prefix // size + num_users * -(-(own + output + size) // size)
    if needed > built.memory.num_blocks:
        raise StartupError(f"engine: that needs {needed} blocks, and the pool has {built.memory.num_blocks}")
