"""Numbers of an engine for people who look."""

from __future__ import annotations

from dataclasses import dataclass

from service.engine.kv.kv_manager import KVManager
from service.engine.scheduling.scheduler import Scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A picture of the engine between two steps; counters run since its start."""

    num_running: int  # requests, whatever the number of their branches
    num_sequences_running: int
    num_waiting: int
    num_blocks_free: int
    num_blocks_cached: int
    num_blocks_used: int
    num_blocks_shared: int  # of the used ones, those that several hold
    num_blocks_logical: int  # as many as would be used if no sequence shared any
    num_block_copies: int  # on the first write to a shared one
    num_host_blocks_free: int
    num_host_blocks_cached: int
    num_host_blocks_used: int  # that somebody counts on who waits, or a transfer
    num_blocks_out: int  # copied to the host
    num_blocks_in: int  # and from it
    num_slots_held: int  # by sequences, shared ones by each of them
    num_slots_filled: int
    num_steps: int
    last_step_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_query_tokens: int  # of prompts that were looked for in the prefix cache
    num_hit_tokens: int  # and of those, what was found
    num_swapped: int  # groups that left for the host
    num_recomputed: int  # groups that left to be computed again
    num_reclaimed: int  # of all that left, those that ran on what was lent to their tenants
    num_recomputed_tokens: int  # computed again for those that had left
    recompute_s: float  # of the steps that did so, their share by tokens
    swap_out_s: float  # that copies to the host took
    swap_in_s: float  # and from it

    @property
    def num_preemptions(self) -> int:
        return self.num_swapped + self.num_recomputed

    def waste_ratio(self, block_size: int) -> float:
        """Slots held and empty over slots held, each counted once."""
        num_held = self.num_blocks_used * block_size
        return min(1.0, (self.num_slots_held - self.num_slots_filled) / num_held) if num_held else 0.0


def collect_stats(
    kv: KVManager, scheduler: Scheduler, *, num_steps: int, last_step_s: float, num_prompt: int, num_output: int
) -> EngineStats:
    """The picture; `num_prompt` and `num_output` are tokens."""
    held, filled = kv.num_slots(scheduler.running)
    host = kv.host
    return EngineStats(
        num_running=len({sequence.group for sequence in scheduler.running}),
        num_sequences_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
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
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_output,
        num_query_tokens=kv.num_query_tokens,
        num_hit_tokens=kv.num_hit_tokens,
        num_swapped=scheduler.preemption.num_swapped,
        num_recomputed=scheduler.preemption.num_recomputed,
        num_reclaimed=scheduler.preemption.num_reclaimed,
        num_recomputed_tokens=scheduler.preemption.num_recomputed_tokens,
        recompute_s=scheduler.preemption.recompute_s,
        swap_out_s=scheduler.preemption.swap_out_s,
        swap_in_s=scheduler.preemption.swap_in_s,
    )
