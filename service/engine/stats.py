from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from service.engine.drafting.drafter import MAX_DRAFTS, SOURCES
from service.engine.drafting.stats import DraftStats
from service.engine.kv.kv_manager import KVManager
from service.engine.output_processor import OutputProcessor
from service.engine.scheduling.scheduler import Scheduler
from service.engine.sequence import SequenceGroup
from service.observability.buckets import STEP_TOKEN_BUCKETS


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Gauges between two steps; counters since the start."""

    num_running: int  # requests
    num_sequences_running: int
    num_waiting: int
    num_blocks: int
    block_size: int  # tokens
    block_bytes: int
    num_blocks_free: int
    num_blocks_cached: int
    num_blocks_used: int
    num_blocks_shared: int  # held several times
    num_blocks_logical: int  # without sharing
    num_block_copies: int  # on write
    num_host_blocks_free: int
    num_host_blocks_cached: int
    num_host_blocks_used: int  # pinned or in transfer
    num_blocks_out: int
    num_blocks_in: int
    num_slots_held: int
    num_slots_filled: int
    num_steps: int
    last_step_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_query_tokens: int  # prompt tokens looked up
    num_hit_tokens: int
    num_swapped: int  # groups
    num_recomputed: int  # groups
    num_reclaimed: int  # over share
    num_recomputed_tokens: int
    recompute_s: float
    swap_out_s: float
    swap_in_s: float
    num_drafts: int = 0  # runs of draft tokens
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_per_pos: tuple[int, ...] = (0,) * MAX_DRAFTS
    num_drafted_by_source: tuple[int, ...] = (0,) * len(SOURCES)
    num_accepted_by_source: tuple[int, ...] = (0,) * len(SOURCES)
    mean_draft_length: float = 0.0  # of the last step's decodes
    iteration_tokens: tuple[float, ...] = (0.0,) * (len(STEP_TOKEN_BUCKETS) + 2)  # Buckets' values
    running_adapters: tuple[str, ...] = ()  # names
    waiting_adapters: tuple[str, ...] = ()

    @property
    def num_preemptions(self) -> int:
        return self.num_swapped + self.num_recomputed

    @property
    def num_blocks_exclusive(self) -> int:
        return self.num_blocks_used - self.num_blocks_shared

    @property
    def kv_usage(self) -> float:
        return self.num_blocks_used / self.num_blocks

    @property
    def swap_out_bytes(self) -> int:
        return self.num_blocks_out * self.block_bytes

    @property
    def swap_in_bytes(self) -> int:
        return self.num_blocks_in * self.block_bytes

    @property
    def last_step_ms(self) -> float:
        return 1e3 * self.last_step_s

    @property
    def waste_ratio(self) -> float:
        """Share of empty slots, 0..1."""
        num_held = self.num_blocks_used * self.block_size
        return min(1.0, (self.num_slots_held - self.num_slots_filled) / num_held) if num_held else 0.0


def collect_stats(
    kv: KVManager,
    scheduler: Scheduler,
    outputs: OutputProcessor,
    *,
    num_steps: int,
    last_step_s: float,
    iteration_tokens: Sequence[float],
) -> EngineStats:
    held, filled = kv.num_slots(scheduler.running)
    host = kv.host
    drafts = DraftStats() if scheduler.speculation is None else scheduler.speculation.stats
    return EngineStats(
        num_running=len({sequence.group for sequence in scheduler.running}),
        num_sequences_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        num_blocks=kv.pool.num_blocks,
        block_size=kv.block_size,
        block_bytes=kv.block_bytes,
        num_blocks_free=kv.pool.num_free,
        num_blocks_cached=kv.pool.num_cached,
        num_blocks_used=kv.pool.num_used,
        num_blocks_shared=kv.pool.num_shared,
        num_blocks_logical=sum(len(sequence.block_table) for sequence in scheduler.running),
        num_block_copies=kv.num_copies,
        num_host_blocks_free=0 if host is None else host.pool.num_free,
        num_host_blocks_cached=0 if host is None else host.pool.num_cached,
        num_host_blocks_used=0 if host is None else host.pool.num_used,
        num_blocks_out=0 if host is None else host.num_blocks_out,
        num_blocks_in=0 if host is None else host.num_blocks_in,
        num_slots_held=held,
        num_slots_filled=filled,
        num_steps=num_steps,
        last_step_s=last_step_s,
        num_prompt_tokens=outputs.num_prompt_tokens,
        num_output_tokens=outputs.num_output_tokens,
        num_query_tokens=kv.num_query_tokens,
        num_hit_tokens=kv.num_hit_tokens,
        num_swapped=scheduler.preemption.num_swapped,
        num_recomputed=scheduler.preemption.num_recomputed,
        num_reclaimed=scheduler.preemption.num_reclaimed,
        num_recomputed_tokens=scheduler.preemption.num_recomputed_tokens,
        recompute_s=scheduler.preemption.recompute_s,
        swap_out_s=scheduler.preemption.swap_out_s,
        swap_in_s=scheduler.preemption.swap_in_s,
        num_drafts=drafts.num_drafts,
        num_draft_tokens=drafts.num_draft_tokens,
        num_accepted_tokens=drafts.num_accepted_tokens,
        num_accepted_per_pos=tuple(drafts.num_accepted_per_pos),
        num_drafted_by_source=tuple(drafts.num_drafted_by_source),
        num_accepted_by_source=tuple(drafts.num_accepted_by_source),
        mean_draft_length=drafts.last_mean_length,
        iteration_tokens=tuple(iteration_tokens),
        running_adapters=_adapters_of(sequence.group for sequence in scheduler.running),
        waiting_adapters=_adapters_of(scheduler.waiting),
    )


def _adapters_of(groups: Iterable[SequenceGroup]) -> tuple[str, ...]:
    return tuple(sorted({group.request.adapter.name for group in groups if group.request.adapter is not None}))
