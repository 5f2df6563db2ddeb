"""Block tables for `/ui`: counts and block ids, no tokens."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from heapq import nlargest
from itertools import islice

from service.engine.kv.kv_manager import KVManager
from service.engine.sequence import Sequence

MAX_TABLES = 64
MAX_PREEMPTED = 16
MAX_TABLE_BLOCKS = 16_384
"""Maximum over all tables."""

WRITABLE, CACHED, ARRIVING = 0, 1, 2
"""Block states. CACHED blocks are kept for later prompts; ARRIVING ones are being copied from the host."""


@dataclass(frozen=True, slots=True)
class TableView:
    """View of one table. `blocks`, `holders` and `states` are truncated where all tables exceed MAX_TABLE_BLOCKS."""

    request_id: str
    branch: int
    num_prompt_tokens: int
    num_tokens: int
    num_computed_tokens: int
    num_blocks: int
    blocks: array[int]
    holders: tuple[int, ...]
    states: bytes
    copied_from: Mapping[int, int]  # source block by index
    host_blocks: tuple[int, ...]
    num_drafted: int
    num_accepted: int


def view_tables(
    kv: KVManager, running: Iterable[Sequence], drafts: Mapping[Sequence, tuple[int, int]]
) -> tuple[TableView, ...]:
    """Return the longest running sequences, then preempted ones with host blocks, MAX_TABLES in total. `drafts`:
    (drafted, accepted) in the last step."""
    pinned = {} if kv.host is None else kv.host.pinned
    preempted = [*islice(pinned, MAX_PREEMPTED)]
    longest = nlargest(MAX_TABLES - len(preempted), running, key=lambda sequence: len(sequence.block_table))
    views, num_left = [], MAX_TABLE_BLOCKS
    for sequence in [*longest, *preempted]:
        view = _view(kv, sequence, num_left, pinned.get(sequence, ()), drafts.get(sequence, (0, 0)))
        num_left -= len(view.blocks)
        views.append(view)
    return tuple(views)


def _view(
    kv: KVManager, sequence: Sequence, max_blocks: int, host_blocks: Iterable[int], drafts: tuple[int, int]
) -> TableView:
    blocks = sequence.block_table[:max_blocks]
    return TableView(
        request_id=sequence.request_id,
        branch=sequence.branch,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_tokens=sequence.num_tokens,
        num_computed_tokens=sequence.num_computed_tokens,
        num_blocks=len(sequence.block_table),
        blocks=blocks,
        holders=tuple(map(kv.pool.num_holders, blocks)),
        states=bytes(_state(kv, block) for block in blocks),
        copied_from=kv.copied_from(sequence),
        host_blocks=tuple(host_blocks),
        num_drafted=drafts[0],
        num_accepted=drafts[1],
    )


def _state(kv: KVManager, block: int) -> int:
    if kv.host is not None and kv.host.is_swapping_in(block):
        return ARRIVING
    return CACHED if kv.pool.is_retained(block) else WRITABLE
