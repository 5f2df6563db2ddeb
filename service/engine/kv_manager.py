"""The memory of sequences: begins, grows, forks and releases block tables, and remembers what full blocks contain.

It decides about blocks and moves no data itself: what has to be copied is recorded for the plan of the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass

from service.engine.block_pool import BlockPool
from service.engine.plan import BlockCopy, Chunk
from service.engine.prefix_cache import Node, PrefixTree, pack_tokens
from service.engine.sequence import Sequence, State


@dataclass(frozen=True, slots=True)
class Match:
    """What of a sequence is in memory already: whole blocks, and a block of which the first tokens are its own."""

    nodes: tuple[Node, ...]
    partial: Node | None
    num_tokens: int


NO_MATCH = Match((), None, 0)


class KVManager:
    """Block tables over one pool of the GPU (or of the CPU, where that is the device).

    With `prefix_caching`, every full block of known tokens is remembered in a tree, and new sequences begin with what
    they find there. A block is found from the moment that a plan has it written: the device runs plans in their order.
    The table of a sequence is, as far as it is remembered, a path of the tree: whoever holds a block holds what is
    before it, and what is before it outlives it in the cache.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = False):
        self.block_size = block_size
        self.pool = BlockPool(num_blocks, self._lose)
        self.num_copies = 0
        self.num_query_tokens = self.num_hit_tokens = 0
        self._copies: list[BlockCopy] = []
        self._tree = PrefixTree(block_size) if prefix_caching else None
        self._node_of: list[Node | None] = [None] * num_blocks
        self._tails: dict[Sequence, Node] = {}  # where in the tree the remembered part of a sequence ends
        self._step = 0

    def start_step(self) -> None:
        """A new plan is being made; what the one before has written may be copied."""
        self._step += 1

    def match(self, sequence: Sequence) -> Match:
        """How much of the sequence, which holds nothing, is in memory; at least its last token is left to compute."""
        if self._tree is None:
            return NO_MATCH
        packed = pack_tokens(sequence.token_ids[: sequence.num_tokens - 1])
        found, closest = self._tree.find(sequence.request.cache_salt, packed)
        partial, num_common = closest or (None, 0)
        if partial is not None and not self._may_be_copied(partial):
            partial, num_common = None, 0
        return Match(tuple(found), partial, len(found) * self.block_size + num_common)

    def num_wanted_blocks(self, sequence: Sequence, match: Match) -> int:
        """Blocks that `begin` and then `extend` to all its tokens take from what is available."""
        kept = [*match.nodes, match.partial] if match.partial else match.nodes
        num_cached = sum(self.pool.is_cached(node.gpu) for node in kept)
        return -(-sequence.num_tokens // self.block_size) - len(match.nodes) + num_cached

    def begin(self, sequence: Sequence, match: Match) -> None:
        """Give a sequence that holds nothing what `match` has just found."""
        if self._tree is None:
            return
        kept = [*match.nodes, match.partial] if match.partial else match.nodes
        sequence.block_table.extend(node.gpu for node in kept)
        self.pool.share(sequence.block_table)
        sequence.num_computed_tokens = match.num_tokens
        self._tails[sequence] = match.nodes[-1] if match.nodes else self._tree.root(sequence.request.cache_salt)
        if sequence.group.num_cached_tokens is None:
            num_hits = sequence.group.num_cached_tokens = min(match.num_tokens, sequence.num_prompt_tokens)
            self.num_query_tokens += sequence.num_prompt_tokens
            self.num_hit_tokens += num_hits

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
        if parent in self._tails:
            tail = self._tails[parent]
            while tail.depth > num_tokens // self.block_size:
                tail = tail.parent
            self._tails[child] = tail

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """The copies that `extend` has asked for since the last call, to be carried out before anything is written."""
        copies, self._copies = tuple(self._copies), []
        return copies

    def remember(self, sequence: Sequence, num_tokens: int) -> None:
        """The plan being made writes the sequence's first `num_tokens` tokens: let others find their full blocks.

        Where the tree knows the same tokens in another block it stops, for this plan writes into the sequence's own.
        """
        tail = self._tails.get(sequence)
        if tail is not None:
            self._tails[sequence] = self._walk(sequence, tail, num_tokens, may_replace=False)

    def settle(self, chunks: Iterable[Chunk], failed: Set[Sequence]) -> None:
        """A step has come to its end, and these of its sequences got NaN: remember the blocks that it has filled, and
        forget those that the failed ones have written since they last got a number."""
        if self._tree is None:
            return
        size = self.block_size
        for sequence, start, length, samples in chunks:
            if length == 1 and (start + 1) % size:
                continue  # no block is full that was not before
            tail, end = self._tails.get(sequence), start + length
            if tail is None or sequence.state is not State.RUNNING or sequence.num_computed_tokens < end:
                continue  # it has left since
            if sequence in failed:
                self._distrust(tail)
                continue
            tail = self._tails[sequence] = self._walk(sequence, tail, end, may_replace=True)
            while samples and not tail.is_proven and tail.parent is not None:
                tail.is_proven = True
                tail = tail.parent

    def release(self, sequence: Sequence) -> None:
        """Take all blocks away; nothing of the sequence is computed any more, though the cache may still know it."""
        self._tails.pop(sequence, None)
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

    def _walk(self, sequence: Sequence, tail: Node, num_tokens: int, *, may_replace: bool) -> Node:
        """Follow the sequence's full blocks in the tree from `tail` on, adding what is missing; returns the new tail.

        A block that the tree has elsewhere is given back for that one, so that its contents are held once.
        """
        size, table = self.block_size, sequence.block_table
        end = min(num_tokens, len(sequence.token_ids)) // size
        while tail.depth < end and tail.in_tree:
            index = tail.depth
            tokens = pack_tokens(sequence.token_ids[index * size : (index + 1) * size])
            node = tail.child(tokens)
            if node is None:
                node = self._tree.add(tail, tokens, self._step)
            if node.gpu is None:
                node.gpu = table[index]
                self._node_of[node.gpu] = node
                self.pool.keep(node.gpu)
            elif node.gpu != table[index]:
                if not may_replace:
                    break
                self.pool.share((node.gpu,))
                self.pool.give_back((table[index],))
                table[index] = node.gpu
            tail = node
        return tail

    def _may_be_copied(self, node: Node) -> bool:
        """Whether the block's contents are there before the step that is being planned."""
        return node.born_at < self._step

    def _lose(self, block: int) -> None:
        """The pool gives a cached block away."""
        node = self._node_of[block]
        node.gpu = self._node_of[block] = None
        self._drop(node)

    def _distrust(self, node: Node) -> None:
        """Drop what was written on the way to this node since it was last proven good, and what follows it."""
        suspect = None
        while node.parent is not None and not node.is_proven:
            suspect, node = node, node.parent
        if suspect is not None and suspect.in_tree:
            self._drop(suspect)

    def _drop(self, node: Node) -> None:
        for gone in self._tree.remove(node):
            if gone.gpu is not None:
                self._node_of[gone.gpu] = None
                self.pool.forget(gone.gpu)

    def check_invariants(self, sequences: Iterable[Sequence]) -> None:
        """Reference counts equal holders, no sequence has computed more than its blocks hold, and the tree is sound."""
        sequences = list(sequences)
        if self._tree is not None:
            self._check_tree(sequences)
        self.pool.check_invariants([sequence.block_table for sequence in sequences])
        for sequence in sequences:
            if sequence.num_computed_tokens > len(sequence.block_table) * self.block_size:
                raise AssertionError(f"{sequence.request_id}: computed tokens without a block")

    def _check_tree(self, sequences: list[Sequence]) -> None:
        self._tree.check_invariants()
        known = {node.gpu: node for node in self._tree.nodes() if node.gpu is not None}
        if known != {block: node for block, node in enumerate(self._node_of) if node is not None}:
            raise AssertionError("the tree and the blocks disagree")
        if any(not self.pool.is_shared(block) for block in known):
            raise AssertionError("a block of the tree may be written to")
        if not self._tails.keys() <= set(sequences):
            raise AssertionError("a sequence that holds nothing has a place in the tree")
        for sequence, tail in self._tails.items():
            path = tail.path()
            if b"".join(node.tokens for node in path) != pack_tokens(
                sequence.token_ids[: tail.depth * self.block_size]
            ):
                raise AssertionError(f"{sequence.request_id} stands in the tree where its tokens do not lead")
            if tail.in_tree and [node.gpu for node in path] != list(sequence.block_table[: tail.depth]):
                raise AssertionError(f"{sequence.request_id} does not hold the blocks of its path")
