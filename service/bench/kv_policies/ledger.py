"""Where the slots of the pool go while a trace is replayed: sums over time, of which the figures are made.

As the paper (section 3.1) divides them: tokens that are cached and needed; reserved slots, which the sequence will come
to fill; internal fragmentation, given and never filled, which shows only at the end; external fragmentation, which the
policy knows at the start that nobody can have: what an allocator's rounding takes, and holes while a request waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from service.bench.kv_policies.policies import ComparedKV, Holding
from service.engine.sequence import Sequence


class Lengths(NamedTuple):
    """Of a request as its sender knows it, without padding."""

    num_prompt: int
    num_output: int


@dataclass(frozen=True, kw_only=True)
class SlotUse:
    """Shares of the pool, over time; together 1."""

    tokens: float
    reserved: float
    internal: float
    external: float
    free: float  # while nobody waits for it

    @property
    def held_waste(self) -> float:
        """Slots held and empty over slots held."""
        held = self.tokens + self.reserved + self.internal
        return 1 - self.tokens / held if held else 0.0


class Slots(NamedTuple):
    """Of one sequence, or of all."""

    tokens: int
    reserved: int
    internal: int
    rounding: int


def slots_of(sequence: Sequence, num_computed: int, holding: Holding, lengths: Lengths) -> Slots:
    """How the slots that a sequence holds are used, of which `num_computed` are filled. What pads its prompt is never
    used, and nothing is any more once it has all that its sender asked for and only its batch goes on."""
    num_padding = sequence.num_prompt_tokens - lengths.num_prompt
    num_pads_held = min(num_padding, num_computed)
    is_needed = num_computed < sequence.num_prompt_tokens + lengths.num_output
    num_final = lengths.num_prompt + lengths.num_output - 1 if is_needed else 0
    filled = min(num_computed - num_pads_held, num_final)
    useful = max(filled, min(holding.given - num_padding, num_final)) if holding.given > num_computed else filled
    return Slots(
        tokens=filled,
        reserved=useful - filled,
        internal=holding.given - useful,
        rounding=holding.taken - holding.given,
    )


class Look(NamedTuple):
    """The pool at one moment."""

    num_running: int
    tokens: int
    reserved: int
    internal: int
    external: int
    free: int


class SlotLedger:
    """Adds up looks at the running sequences, each for the time that it stands for."""

    def __init__(self) -> None:
        self._sums = [0.0] * len(Look._fields)
        self.seconds = 0.0
        self.peak_running = 0

    def add(self, look: Look, seconds: float) -> None:
        for place, count in enumerate(look):
            self._sums[place] += count * seconds
        self.seconds += seconds
        self.peak_running = max(self.peak_running, look.num_running)

    @property
    def mean_running(self) -> float:
        return self._sums[0] / self.seconds if self.seconds else 0.0

    def use(self) -> SlotUse:
        """Nothing looked at is all free."""
        parts = self._sums[1:] if any(self._sums[1:]) else [0, 0, 0, 0, 1]
        tokens, reserved, internal, external, free = (part / sum(parts) for part in parts)
        return SlotUse(tokens=tokens, reserved=reserved, internal=internal, external=external, free=free)


def look_at(
    running: Mapping[Sequence, int], kv: ComparedKV, num_slots: int, lengths: Mapping[str, Lengths], *, is_short: bool
) -> Look:
    """Whose slots the pool's `num_slots` are. `running`: how many tokens of each sequence are computed; `is_short`: a
    request waits for memory."""
    tokens = reserved = internal = rounding = 0
    for sequence, num_computed in running.items():
        slots = slots_of(sequence, num_computed, kv.holding(sequence, num_computed), lengths[sequence.request_id])
        tokens += slots.tokens
        reserved += slots.reserved
        internal += slots.internal
        rounding += slots.rounding
    holes = num_slots - tokens - reserved - internal - rounding
    external, free = (rounding + holes, 0) if is_short else (rounding, holes)
    return Look(len(running), tokens, reserved, internal, external, free)
