"""The memory of sequences: grows and releases block tables. It decides about blocks and moves no data itself."""

from __future__ import annotations

from collections.abc import Iterable

from service.engine.block_pool import BlockPool
from service.engine.sequence import Sequence


class KVManager:
    """Block tables over one pool of the GPU (or of the CPU, where that is the device)."""

    def __init__(self, num_blocks: int, block_size: int):
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)

    def num_missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks the sequence lacks to hold its first `num_tokens` tokens."""
        missing = -(-num_tokens // self.block_size) - len(sequence.block_table)
        return missing if missing > 0 else 0

    def extend(self, sequence: Sequence, num_tokens: int) -> None:
        """Give the sequence room for its first `num_tokens` tokens. Raises OutOfBlocks and then changes nothing."""
        missing = self.num_missing_blocks(sequence, num_tokens)
        if missing:
            sequence.block_table.extend(self.pool.take(missing))

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
