"""Measures decode steps during copies to and from the host, at full bus speed and at lower paces."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from model.ops.host_blocks import Transfer
from service.bench.engine_measures import steady_decode
from service.engine.build import BuiltEngine
from service.errors import StartupError

COPIED_AT_ONCE, MAX_IN_FLIGHT = 128, 6
"""Blocks per transfer at full speed, and maximum transfers in flight per direction.

Together they must outlast two steps, because a transfer begins after the step that requested it.
"""

ROUNDS = 8
"""Rounds per pace; must be even."""

IDLE_S = 0.3


@dataclass(frozen=True)
class Pace:
    """Blocks per direction requested with every step; None: full speed."""

    num_out: int | None
    num_in: int | None


ALONE, OUT, IN, BOTH = Pace(0, 0), Pace(None, 0), Pace(0, None), Pace(None, None)


@dataclass(frozen=True, kw_only=True)
class PacedFigures:
    num_out: int | None  # blocks per step; None: full speed
    num_in: int | None
    step_ms: float  # mean of the rounds' medians
    slowdown: float  # relative to steps alone; 0.03 is 3 %
    slowdown_error: float  # standard error over pairs of rounds
    rounds_ms: list[float]
    out_gb_per_s: float
    in_gb_per_s: float
    both_gb_per_s: float


@dataclass(frozen=True, kw_only=True)
class CopyFigures:
    batch: int
    num_steps: int
    step_alone_ms: float  # mean of the rounds' medians
    step_beside_ms: float
    step_beside_outs_ms: float
    step_beside_ins_ms: float
    slowdown: float  # during copies in both directions; 0.03 is 3 %
    out_gb_per_s: float
    in_gb_per_s: float
    both_gb_per_s: float  # during steps
    idle_both_gb_per_s: float  # without steps
    paced: list[PacedFigures]  # OUT, IN, BOTH, then the requested paces


def measure_copies(
    built: BuiltEngine, batch: int, context: int, num_steps: int, paces: Sequence[Pace] = ()
) -> CopyFigures:
    """Measure steps alone and during copies. Raises StartupError without a host cache, or if the work does not fit."""
    host, pool = built.executor.host, built.engine.pool
    if host is None:
        raise StartupError("--copies: --swap-space is missing or 0")
    phases = [ALONE, OUT, IN, BOTH, *paces]
    steps_s: dict[Pace, list[float]] = {phase: [] for phase in phases}
    copied = {phase: _Copied() for phase in phases}
    with steady_decode(built, batch, context, len(phases) * num_steps):
        blocks = pool.allocate(2 * _num_blocks_each(built, paces))
        for number in range(ROUNDS):  # alternate the order, because contexts grow
            for phase in phases if number % 2 == 0 else reversed(phases):
                copies = _Copies(built, blocks, phase)
                steps_s[phase].append(statistics.median(_steps(built, max(1, num_steps // ROUNDS), copies)))
                copied[phase].add(copies.stop())
        idle = _Copies(built, blocks, BOTH)
        while idle.seconds < IDLE_S:
            idle.poll()
        idle_copied = idle.stop()
        pool.release(blocks)
    block_bytes = built.memory.block_bytes
    rows = [_paced(phase, steps_s[phase], steps_s[ALONE], copied[phase], block_bytes) for phase in phases[1:]]
    outs, ins, both = rows[:3]
    return CopyFigures(
        batch=batch,
        num_steps=num_steps,
        step_alone_ms=1e3 * statistics.fmean(steps_s[ALONE]),
        step_beside_ms=both.step_ms,
        step_beside_outs_ms=outs.step_ms,
        step_beside_ins_ms=ins.step_ms,
        slowdown=both.slowdown,
        out_gb_per_s=both.out_gb_per_s,
        in_gb_per_s=both.in_gb_per_s,
        both_gb_per_s=both.both_gb_per_s,
        idle_both_gb_per_s=sum(idle_copied.gb_per_s(block_bytes)),
        paced=rows,
    )


def _num_blocks_each(built: BuiltEngine, paces: Sequence[Pace]) -> int:
    least = max((blocks or 0 for pace in paces for blocks in (pace.num_out, pace.num_in)), default=1)
    assert built.executor.host is not None
    room = min(built.executor.host.num_ready // 2, built.engine.pool.num_available // 2)
    if room < least:
        raise StartupError(f"--copies: too few blocks left by --batch: {room} per direction and tier (needed: {least})")
    return max(least, min(COPIED_AT_ONCE, room))


def _paced(
    pace: Pace, steps_s: Sequence[float], alone_s: Sequence[float], copied: _Copied, block_bytes: int
) -> PacedFigures:
    pairs = [sum(steps_s[at : at + 2]) / sum(alone_s[at : at + 2]) - 1 for at in range(0, ROUNDS, 2)]
    out_gb_per_s, in_gb_per_s = copied.gb_per_s(block_bytes)
    return PacedFigures(
        num_out=pace.num_out,
        num_in=pace.num_in,
        step_ms=1e3 * statistics.fmean(steps_s),
        slowdown=statistics.fmean(steps_s) / statistics.fmean(alone_s) - 1,
        slowdown_error=statistics.stdev(pairs) / len(pairs) ** 0.5,
        rounds_ms=[1e3 * seconds for seconds in steps_s],
        out_gb_per_s=out_gb_per_s,
        in_gb_per_s=in_gb_per_s,
        both_gb_per_s=out_gb_per_s + in_gb_per_s,
    )


@dataclass
class _Copied:
    seconds: float = 0.0
    num_out: int = 0
    num_in: int = 0

    def add(self, other: _Copied) -> None:
        self.seconds += other.seconds
        self.num_out += other.num_out
        self.num_in += other.num_in

    def gb_per_s(self, block_bytes: int) -> tuple[float, float]:
        gb_per_block_s = block_bytes / 1e9 / self.seconds
        return self.num_out * gb_per_block_s, self.num_in * gb_per_block_s


class _OneWayCopies:
    """Transfers in one direction; `ask(count)` starts one of `count` blocks."""

    def __init__(self, ask: Callable[[int], Transfer], pace: int | None, most: int):
        self._ask = ask
        self._count = min(COPIED_AT_ONCE, most) if pace is None else pace
        self._at_once = MAX_IN_FLIGHT if pace is None else 1
        self._in_flight: list[Transfer] = []
        self.num_done = 0

    def poll(self) -> None:
        self.count_done()
        for _ in range(min(self._at_once, MAX_IN_FLIGHT - len(self._in_flight)) if self._count else 0):
            self._in_flight.append(self._ask(self._count))

    def count_done(self) -> None:
        while self._in_flight and self._in_flight[0].is_done():
            self._in_flight.pop(0)
            self.num_done += self._count

    def wait(self) -> None:
        for transfer in self._in_flight:
            transfer.wait()


class _Copies:
    """Transfers in both directions, each over half of `blocks`."""

    def __init__(self, built: BuiltEngine, blocks: Sequence[int], pace: Pace) -> None:
        host = built.executor.host
        assert host is not None
        most = len(blocks) // 2
        out, back, to, source = blocks[:most], blocks[most:], list(range(most)), list(range(most, 2 * most))
        self._out = _OneWayCopies(lambda count: host.copy_out(out[:count], to[:count]), pace.num_out, most)
        self._in = _OneWayCopies(lambda count: host.copy_in(source[:count], back[:count]), pace.num_in, most)
        self._begin_s = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._begin_s

    def poll(self) -> None:
        self._out.poll()
        self._in.poll()

    def stop(self) -> _Copied:
        """Return the finished copies, then wait for those in flight."""
        for copies in (self._out, self._in):
            copies.count_done()
        copied = _Copied(self.seconds, self._out.num_done, self._in.num_done)
        for copies in (self._out, self._in):
            copies.wait()
        return copied


def _steps(built: BuiltEngine, num_steps: int, copies: _Copies) -> list[float]:
    seconds = []
    for _ in range(num_steps):
        begin_s = time.perf_counter()
        copies.poll()
        built.engine.step()
        built.engine.drain_request_outputs()
        seconds.append(time.perf_counter() - begin_s)
    return seconds
