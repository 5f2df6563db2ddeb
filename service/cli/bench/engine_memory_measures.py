"""What `quire bench engine` measures of memory: users with a prefix in common, copies to the host beside decode."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from model.sampling_params import SamplingParams
from service.cli.bench.engine_measures import steady_decode
from service.engine.build import BuiltEngine
from service.engine.sequence import Request
from service.errors import StartupError

NUM_LATER = 8
"""Users of one prefix who come one after the other."""

COPIED_AT_ONCE, FLIGHTS = 128, 6
"""Blocks of a transfer at most, and transfers of a direction that are always asked for. Each begins when the step is
done during which it was asked for: together they have to last for longer than two steps."""

OUT, IN = 0, 1

ROUNDS = 4
"""Of the steps alone and beside copies; an even number."""

IDLE_S = 0.3
"""For so long copies go on by themselves."""


@dataclass(frozen=True, kw_only=True)
class PrefixFigures:
    """Users whose prompts begin alike: all at once on an empty cache, and others one after the other."""

    num_users: int
    prefix_tokens: int
    own_tokens: int  # of each user's prompt, behind the prefix
    output_tokens: int  # of each
    total_s: float  # all at once
    computed_prompt_tokens: int  # of all of them together
    most_blocks_used: int
    first_ttft_ms: float  # of a user alone whose prefix nobody has had
    later_ttft_ms: float  # of one alone whose prefix others have had, the median
    ttft_ratio: float
    strangers_ttft_ms: float  # of as many users at once, each with a prefix of its own, the mean
    together_ttft_ms: float  # of as many at once whose prefix others have had, the mean
    together_ttft_ratio: float


@dataclass(frozen=True, kw_only=True)
class CopyFigures:
    """Steps of a full batch alone, and beside transfers that never pause: in both directions, and in one."""

    batch: int
    num_steps: int
    step_alone_ms: float  # the mean of the rounds' medians
    step_beside_ms: float
    step_beside_outs_ms: float
    step_beside_ins_ms: float
    slowdown: float  # how much longer beside both, 0.03 is 3 %
    out_gb_per_s: float
    in_gb_per_s: float
    both_gb_per_s: float  # beside the steps
    idle_both_gb_per_s: float  # with nothing else to do


def measure_prefix(
    built: BuiltEngine, num_users: int, prefix_tokens: int, own_tokens: int, output_tokens: int
) -> PrefixFigures:
    """Raises StartupError where the engine does not hold them."""
    _expect_room(built, num_users, prefix_tokens, own_tokens, output_tokens)
    random, vocab = np.random.default_rng(0), built.config.vocab_size

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(random.integers(0, vocab, count).tolist())

    _run(built, [tokens(prefix_tokens + own_tokens)], 2)  # warms up
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


def measure_copies(built: BuiltEngine, batch: int, context: int, num_steps: int) -> CopyFigures:
    """Raises StartupError without a second tier, or where there is no room for the copies beside the batch."""
    host, pool = built.executor.host, built.engine.pool
    if host is None:
        raise StartupError("--copies: there is no second tier: give it --swap-space")
    phases = ((), (OUT,), (IN,), (OUT, IN))
    steps_s: dict[tuple[int, ...], list[float]] = {phase: [] for phase in phases}
    beside = _Carried()
    with steady_decode(built, batch, context, len(phases) * num_steps):
        count = min(COPIED_AT_ONCE, host.num_ready // 2, pool.num_available // 2)
        if count == 0:
            raise StartupError("--copies: the pool has no free blocks beside the batch, or the host none ready")
        blocks = pool.take(2 * count)
        for number in range(ROUNDS):  # contexts grow: forth and back, so that no phase has the longer ones
            for phase in phases if number % 2 == 0 else reversed(phases):
                copies = _Copies(built, blocks, phase)
                steps_s[phase].append(statistics.median(_steps(built, max(1, num_steps // ROUNDS), copies)))
                carried = copies.stop()
                if phase == (OUT, IN):
                    beside.add(carried)
        idle = _Copies(built, blocks, (OUT, IN))
        while idle.seconds < IDLE_S:
            idle.go_on()
        alone_copies = idle.stop()
        pool.give_back(blocks)
    gb = built.memory.block_bytes / 1e9
    alone_ms, outs_ms, ins_ms, beside_ms = (1e3 * statistics.fmean(steps_s[phase]) for phase in phases)
    return CopyFigures(
        batch=batch,
        num_steps=num_steps,
        step_alone_ms=alone_ms,
        step_beside_ms=beside_ms,
        step_beside_outs_ms=outs_ms,
        step_beside_ins_ms=ins_ms,
        slowdown=beside_ms / alone_ms - 1,
        out_gb_per_s=beside.num_out * gb / beside.seconds,
        in_gb_per_s=beside.num_in * gb / beside.seconds,
        both_gb_per_s=(beside.num_out + beside.num_in) * gb / beside.seconds,
        idle_both_gb_per_s=(alone_copies.num_out + alone_copies.num_in) * gb / alone_copies.seconds,
    )


@dataclass
class _Carried:
    """Blocks that were copied, and in what time."""

    seconds: float = 0.0
    num_out: int = 0
    num_in: int = 0

    def add(self, other: _Carried) -> None:
        self.seconds += other.seconds
        self.num_out += other.num_out
        self.num_in += other.num_in


class _Copies:
    """Transfers of these directions, FLIGHTS of each always asked for; of none, perhaps."""

    def __init__(self, built: BuiltEngine, blocks: Sequence[int], directions: tuple[int, ...]):
        host = built.executor.host
        count = len(blocks) // 2
        out, back, on_host = blocks[:count], blocks[count:], list(range(2 * count))
        self._asks = [lambda: host.copy_out(out, on_host[:count]), lambda: host.copy_in(on_host[count:], back)]
        self._count = count
        self._flights: dict[int, list] = {direction: [] for direction in directions}
        self._num_done = [0, 0]
        self._begin_s = time.perf_counter()
        self.go_on()

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.perf_counter() - self._begin_s

    def go_on(self) -> None:
        """Count what is done, and ask for as many again."""
        self._count_done()
        for direction, flights in self._flights.items():
            while len(flights) < FLIGHTS:
                flights.append(self._asks[direction]())

    def stop(self) -> _Carried:
        """What was carried until now; then waits for what is under way."""
        self._count_done()
        carried = _Carried(self.seconds, *self._num_done)
        for flight in (flight for flights in self._flights.values() for flight in flights):
            flight.wait()
        return carried

    def _count_done(self) -> None:
        for direction, flights in self._flights.items():
            while flights and flights[0].is_done():
                flights.pop(0)
                self._num_done[direction] += self._count


def _steps(built: BuiltEngine, num_steps: int, copies: _Copies) -> list[float]:
    seconds = []
    for _ in range(num_steps):
        begin_s = time.perf_counter()
        copies.go_on()
        built.engine.step()
        built.engine.take_outputs()
        seconds.append(time.perf_counter() - begin_s)
    return seconds


def _run(built: BuiltEngine, prompts: Sequence[tuple[int, ...]], num_output: int) -> tuple[float, float, int]:
    """(seconds to the end, mean seconds to the first token, most blocks used)."""
    wishes = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        built.engine.add(Request(request_id=str(number), prompt=prompt, sampling=wishes))
    begin_s, most = time.perf_counter(), 0
    first_s: dict[str, float] = {}
    while built.engine.has_work:
        built.engine.step()
        now_s = time.perf_counter() - begin_s
        for output in built.engine.take_outputs():
            first_s.setdefault(output.request_id, now_s)
        most = max(most, built.engine.pool.num_used)
    return time.perf_counter() - begin_s, statistics.fmean(first_s.values()), most


def _expect_room(built: BuiltEngine, num_users: int, prefix: int, own: int, output: int) -> None:
    if prefix + own + output > built.limits.max_model_len:
        raise StartupError(f"engine: {prefix + own + output} tokens are more than {built.limits.max_model_len}")
    size = built.memory.block_size
    needed = prefix // size + num_users * -(-(own + output + size) // size)
    if needed > built.memory.num_blocks:
        raise StartupError(f"engine: that needs {needed} blocks, and the pool has {built.memory.num_blocks}")
