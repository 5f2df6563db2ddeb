"""The memory of sequences: grows, forks and releases block tables.

It decides about blocks and moves no data itself: what has to be copied is recorded for the plan of the step.
"""

from __future__ import annotations

from collections.abc import Iterable

from service.engine.block_pool import BlockPool
from service.engine.plan import BlockCopy
from service.engine.sequence import Sequence


class KVManager:
    """Block tables over one pool of the GPU (or of the CPU, where that is the device)."""

    def __init__(self, num_blocks: int, block_size: int):
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.num_copies = 0
        self._copies: list[BlockCopy] = []

    def num_missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks the sequence lacks to write its tokens from the first uncomputed one up to `num_tokens`."""
        table, size = sequence.block_table, self.block_size
        first, end = sequence.num_computed_tokens // size, -(-num_tokens // size)
        if end == first + 1 <= len(table):  # most steps of most sequences
            return int(self.pool.is_shared(table[first]))
        return max(0, end - len(table)) + sum(map(self.pool.is_shared, table[first:end]))

    def extend(self, sequence: Sequence, num_tokens: int) -> None:
        """Let the sequence write its tokens from the first uncomputed one up to `num_tokens`.

        A block in that range which others hold too is replaced by a copy of its own; the last holder writes in place.
        Raises OutOfBlocks and then changes nothing.
        """
        missing = self.num_missing_blocks(sequence, num_tokens)
        if not missing:
            return
        table, fresh = sequence.block_table, self.pool.take(missing)
        end = min(-(-num_tokens // self.block_size), len(table))
        for index in range(sequence.num_computed_tokens // self.block_size, end):
            if self.pool.is_shared(table[index]):
                self._copies.append(BlockCopy(table[index], fresh[-1]))
                self.pool.give_back((table[index],))
                table[index] = fresh.pop()
                self.num_copies += 1
        table.extend(fresh)

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Let the child, which holds nothing, begin as a copy of the parent's first `num_tokens` computed tokens.

        Every block is shared, the last one too where it is not full; whoever writes into it first copies it.
        """
        child.block_table.extend(parent.block_table[: -(-num_tokens // self.block_size)])
        self.pool.share(child.block_table)
        child.num_computed_tokens = num_tokens

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """The copies that `extend` has asked for since the last call, to be carried out before anything is written."""
        copies, self._copies = tuple(self._copies), []
        return copies

    def release(self, sequence: Sequence) -> None:
        """Take all blocks away; nothing of the sequence is computed any more."""
        self.pool.give_back(sequence.block_table)
        del sequence.block_table[:]
        sequence.num_computed_tokens = 0

    def num_slots(self, sequences: Iterable[Sequence]) -> tuple[int, int]:
        """(held, filled) slots of these sequences: the difference is what paging wastes."""
        held = filled = 0
        for sequence in sequences:
            held += len(sequence.block_table) * self.block_size
            filled += sequence.num_computed_tokens
        return held, filled

    def check_invariants(self, sequences: Iterable[Sequence]) -> None:
        """Reference counts equal holders, and no sequence has computed more than its blocks hold."""
        sequences = list(sequences)
        self.pool.check_invariants([sequence.block_table for sequence in sequences])
        for sequence in sequences:
            if sequence.num_computed_tokens > len(sequence.block_table) * self.block_size:
                raise AssertionError(f"{sequence.request_id}: computed tokens without a block")
