"""Decode steps beside copies to the host and back: what they cost, at the bus's full speed and at less."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from model.ops.host_blocks import Transfer
from service.bench.engine_measures import steady_decode
from service.engine.build import BuiltEngine
from service.errors import StartupError

COPIED_AT_ONCE, FLIGHTS = 128, 6
"""Blocks of a transfer that never pauses, and transfers of a direction under way or asked for at most. Each begins when
the step is done during which it was asked for: together they have to last for longer than two steps."""

ROUNDS = 8
"""Of the steps alone and beside each kind of copies; an even number."""

IDLE_S = 0.3
"""For so long copies go on by themselves."""


@dataclass(frozen=True)
class Pace:
    """Blocks of each direction that are asked for with every step, as the engine does; None: as fast as they go."""

    num_out: int | None
    num_in: int | None


ALONE, OUT, IN, BOTH = Pace(0, 0), Pace(None, 0), Pace(0, None), Pace(None, None)


@dataclass(frozen=True, kw_only=True)
class PacedFigures:
    """Steps beside copies of one pace."""

    num_out: int | None  # blocks a step; None: never pausing
    num_in: int | None
    step_ms: float  # the mean of the rounds' medians
    slowdown: float  # of steps alone, 0.03 is 3 %
    slowdown_error: float  # its standard error, from pairs of rounds
    rounds_ms: list[float]  # the rounds' medians
    out_gb_per_s: float
    in_gb_per_s: float
    both_gb_per_s: float


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
    paced: list[PacedFigures]  # those three, and the paces that were asked for


def measure_copies(
    built: BuiltEngine, batch: int, context: int, num_steps: int, paces: Sequence[Pace] = ()
) -> CopyFigures:
    """Raises StartupError without a second tier, or where there is no room for the copies beside the batch."""
    host, pool = built.executor.host, built.engine.pool
    if host is None:
        raise StartupError("--copies: there is no second tier: give it --swap-space")
    phases = [ALONE, OUT, IN, BOTH, *paces]
    steps_s: dict[Pace, list[float]] = {phase: [] for phase in phases}
    carried = {phase: _Carried() for phase in phases}
    with steady_decode(built, batch, context, len(phases) * num_steps):
        blocks = pool.allocate(2 * _num_blocks_each(built, paces))
        for number in range(ROUNDS):  # contexts grow: forth and back, so that no phase has the longer ones
            for phase in phases if number % 2 == 0 else reversed(phases):
                copies = _Copies(built, blocks, phase)
                steps_s[phase].append(statistics.median(_steps(built, max(1, num_steps // ROUNDS), copies)))
                carried[phase].add(copies.stop())
        idle = _Copies(built, blocks, BOTH)
        while idle.seconds < IDLE_S:
            idle.go_on()
        idle_carried = idle.stop()
        pool.release(blocks)
    block_bytes = built.memory.block_bytes
    rows = [_paced(phase, steps_s[phase], steps_s[ALONE], carried[phase], block_bytes) for phase in phases[1:]]
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
        idle_both_gb_per_s=sum(idle_carried.gb_per_s(block_bytes)),
        paced=rows,
    )


def _num_blocks_each(built: BuiltEngine, paces: Sequence[Pace]) -> int:
    """Blocks of the pool for each direction."""
    least = max((blocks for pace in paces for blocks in (pace.num_out, pace.num_in)), default=1)
    room = min(built.executor.host.num_ready // 2, built.engine.pool.num_available // 2)
    if room < least:
        raise StartupError(f"--copies: beside --batch, each direction needs {least} blocks of either tier, has {room}")
    return max(least, min(COPIED_AT_ONCE, room))


def _paced(
    pace: Pace, steps_s: Sequence[float], alone_s: Sequence[float], carried: _Carried, block_bytes: int
) -> PacedFigures:
    pairs = [sum(steps_s[at : at + 2]) / sum(alone_s[at : at + 2]) - 1 for at in range(0, ROUNDS, 2)]
    out_gb_per_s, in_gb_per_s = carried.gb_per_s(block_bytes)
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
class _Carried:
    """Blocks that were copied, and in what time."""

    seconds: float = 0.0
    num_out: int = 0
    num_in: int = 0

    def add(self, other: _Carried) -> None:
        self.seconds += other.seconds
        self.num_out += other.num_out
        self.num_in += other.num_in

    def gb_per_s(self, block_bytes: int) -> tuple[float, float]:
        return tuple(count * block_bytes / 1e9 / self.seconds for count in (self.num_out, self.num_in))


class _Lane:
    """Transfers of one direction: `ask` begins one of so many blocks."""

    def __init__(self, ask: Callable[[int], Transfer], pace: int | None, most: int):
        self._ask = ask
        self._count = min(COPIED_AT_ONCE, most) if pace is None else pace
        self._at_once = FLIGHTS if pace is None else 1
        self._flights: list[Transfer] = []
        self.num_done = 0

    def go_on(self) -> None:
        """Count what is done, and ask for more."""
        self.count_done()
        for _ in range(min(self._at_once, FLIGHTS - len(self._flights)) if self._count else 0):
            self._flights.append(self._ask(self._count))

    def count_done(self) -> None:
        while self._flights and self._flights[0].is_done():
            self._flights.pop(0)
            self.num_done += self._count

    def wait(self) -> None:
        for flight in self._flights:
            flight.wait()


class _Copies:
    """Transfers of both directions, each at its pace; half of `blocks` for each."""

    def __init__(self, built: BuiltEngine, blocks: Sequence[int], pace: Pace):
        host = built.executor.host
        most = len(blocks) // 2
        out, back, to, source = blocks[:most], blocks[most:], list(range(most)), list(range(most, 2 * most))
        self._out = _Lane(lambda count: host.copy_out(out[:count], to[:count]), pace.num_out, most)
        self._in = _Lane(lambda count: host.copy_in(source[:count], back[:count]), pace.num_in, most)
        self._begin_s = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.perf_counter() - self._begin_s

    def go_on(self) -> None:
        """Count what is done, and ask for more."""
        self._out.go_on()
        self._in.go_on()

    def stop(self) -> _Carried:
        """What was carried until now; then waits for what is under way."""
        for lane in (self._out, self._in):
            lane.count_done()
        carried = _Carried(self.seconds, self._out.num_done, self._in.num_done)
        for lane in (self._out, self._in):
            lane.wait()
        return carried


def _steps(built: BuiltEngine, num_steps: int, copies: _Copies) -> list[float]:
    seconds = []
    for _ in range(num_steps):
        begin_s = time.perf_counter()
        copies.go_on()
        built.engine.step()
        built.engine.drain_request_outputs()
        seconds.append(time.perf_counter() - begin_s)
    return seconds
