"""What must hold of block tables, whatever has happened."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping

from service.engine.block_pool import BlockPool
from service.engine.prefix_cache import Node, pack_tokens
from service.engine.sequence import Sequence


def check_tables(sequences: Iterable[Sequence], pool: BlockPool, block_size: int) -> None:
    """No sequence has computed more than its blocks hold, and no two may write to the same block."""
    for sequence in sequences:
        if sequence.num_computed_tokens > len(sequence.block_table) * block_size:
            raise AssertionError(f"{sequence.request_id}: computed tokens without a block")
        writable = range(sequence.num_computed_tokens, sequence.num_writable_tokens, block_size)
        if any(pool.is_shared(sequence.block_table[at // block_size]) for at in writable):
            raise AssertionError(f"{sequence.request_id}: it takes a block for its own that is not")


def check_tails(tails: Mapping[Sequence, Node], sequences: Iterable[Sequence], block_size: int) -> None:
    """What is remembered of each sequence is what it holds, and nothing is of others."""
    if not tails.keys() <= set(sequences):
        raise AssertionError("a sequence that holds nothing has a place in the tree")
    for sequence, tail in tails.items():
        check_path(sequence.request_id, tail, sequence.token_ids[: tail.depth * block_size], sequence.block_table)


def check_path(name: str, tail: Node, token_ids: Iterable[int], table: array) -> None:
    """A sequence holds the blocks of its path in the tree, and its tokens lead there."""
    path = tail.path()
    if b"".join(node.tokens for node in path) != pack_tokens(token_ids):
        raise AssertionError(f"{name} stands in the tree where its tokens do not lead")
    if tail.in_tree and [node.gpu for node in path] != list(table[: tail.depth]):
        raise AssertionError(f"{name} does not hold the blocks of its path")
