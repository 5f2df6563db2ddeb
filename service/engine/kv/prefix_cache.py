"""Prefix cache: a prefix tree over both tiers.

A node without any block leaves the tree with its descendants: a prefix never outlives its parent.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from service.engine.kv.block_pool import BlockPool
from service.engine.kv.host_cache import HostCache
from service.engine.kv.prefix_tree import PrefixNode, PrefixTree, pack_tokens


@dataclass(frozen=True, slots=True)
class Match:
    """Cached prefix: full blocks, optionally followed by a partial one."""

    nodes: list[PrefixNode]
    partial: PrefixNode | None
    num_tokens: int
    on_gpu: list[int]  # blocks to share, the partial one last
    on_host: list[PrefixNode]

    @classmethod
    def of(cls, nodes: list[PrefixNode], partial: PrefixNode | None, num_tokens: int) -> Match:
        blocks = [node.gpu for node in nodes]
        on_host = [node for node in nodes if node.gpu is None] if None in blocks else []
        on_gpu = [block for block in blocks if block is not None]
        if partial is not None:
            on_gpu.append(partial.gpu_block())
        return cls(nodes, partial, num_tokens, on_gpu, on_host)


NO_MATCH = Match.of([], None, 0)


class PrefixCache:
    """Map from contents to blocks. Planned blocks already match, as plans run in order; a copy needs a block written by
    an earlier plan."""

    def __init__(self, num_blocks: int, block_size: int, *, with_host: bool):
        self.pool = BlockPool(num_blocks, self._on_evict)
        self.host = HostCache(self.pool, self._remove_subtree) if with_host else None
        self._block_size = block_size
        self._tree = PrefixTree(block_size)
        self._node_of: list[PrefixNode | None] = [None] * num_blocks
        self._step = 0

    def start_step(self) -> None:
        self._step += 1

    def root(self, salt: str) -> PrefixNode:
        return self._tree.root(salt)

    def match(self, salt: str, token_ids: Sequence[int], should_swap_in: Callable[[int, int], bool]) -> Match:
        """Return the longest cached prefix. `should_swap_in(num_tokens, num_blocks)` decides whether to swap in
        `num_blocks` host blocks after `num_tokens` on the GPU."""
        found, closest = self._tree.find(salt, pack_tokens(token_ids))
        nodes = self._worth_swapping_in(found, should_swap_in)
        if len(nodes) < len(found) or closest is None or not self.is_written(closest[0]):
            return Match.of(nodes, None, len(nodes) * self._block_size)
        partial, num_common = closest
        return Match.of(nodes, partial, len(nodes) * self._block_size + num_common)

    def is_written(self, node: PrefixNode) -> bool:
        """Return True if the GPU holds the contents before the planned step runs."""
        if node.gpu is None or node.written_by >= self._step:
            return False
        return self.host is None or not self.host.is_swapping_in(node.gpu)

    def insert(
        self, tail: PrefixNode, token_ids: Sequence[int], table: array[int], end: int, *, may_replace: bool
    ) -> PrefixNode:
        """Insert full blocks from `tail` up to block `end`; return the last node. A duplicate block is replaced;
        without `may_replace` (still being written) it ends the path."""
        size = self._block_size
        while tail.depth < end and tail.in_tree:
            index = tail.depth
            tokens = pack_tokens(token_ids[index * size : (index + 1) * size])
            node = tail.child(tokens)
            if node is None:
                node = self._tree.add(tail, tokens)
            if node.gpu is None:
                self._assign_block(node, table[index])
            elif node.gpu != table[index]:
                if not may_replace or (self.host is not None and self.host.is_swapping_in(node.gpu)):
                    break
                self.pool.share((node.gpu,))
                self.pool.release((table[index],))
                table[index] = node.gpu
            tail = node
        return tail

    def swap_in(self, nodes: Sequence[PrefixNode]) -> None:
        """Copy host-only nodes to new GPU blocks. Raises OutOfBlocks."""
        blocks = self.pool.allocate(len(nodes))
        if self.host is None:
            raise AssertionError("nothing can be swapped in without a host cache")
        self.host.swap_in(nodes, blocks)
        for node, block in zip(nodes, blocks, strict=True):
            self._assign_block(node, block)

    def oldest_unsaved(self, count: int) -> list[PrefixNode]:
        """Return up to `count` nodes that the host lacks, next to evict, parents first."""
        nodes = [self._known_node(block) for block in islice(self.pool.oldest_unsaved(), count)]
        return [node for node in reversed(nodes) if self.is_written(node)]

    def mark_valid(self, tail: PrefixNode) -> None:
        """Mark the blocks up to `tail` valid: a token attending to them had finite logits."""
        while not tail.is_valid and tail.parent is not None:
            tail.is_valid = True
            tail = tail.parent

    def invalidate_unproven(self, tail: PrefixNode) -> None:
        """Drop the blocks after the last valid one up to `tail`, with their descendants."""
        suspect = None
        while tail.parent is not None and not tail.is_valid:
            suspect, tail = tail, tail.parent
        if suspect is not None and suspect.in_tree:
            self._remove_subtree(suspect)

    def drop_salt(self, salt: str) -> None:
        for node in self._tree.remove_root(salt):
            self._release_node(node)

    def _worth_swapping_in(
        self, found: list[PrefixNode], should_swap_in: Callable[[int, int], bool]
    ) -> list[PrefixNode]:
        num_host = [node.gpu for node in found].count(None)
        if num_host == 0:
            return found
        first = next(index for index, node in enumerate(found) if node.gpu is None)
        return found if should_swap_in(first * self._block_size, num_host) else found[:first]

    def _assign_block(self, node: PrefixNode, block: int) -> None:
        node.gpu, node.written_by = block, self._step
        self._node_of[block] = node
        self.pool.retain(block, is_saved=node.host is not None)

    def _known_node(self, block: int) -> PrefixNode:
        node = self._node_of[block]
        if node is None:
            raise AssertionError(f"block {block} is cached and not in the tree")
        return node

    def _on_evict(self, block: int) -> None:
        node = self._known_node(block)
        node.gpu = self._node_of[block] = None
        if node.host is None:
            self._remove_subtree(node)

    def _remove_subtree(self, node: PrefixNode) -> None:
        for gone in self._tree.remove(node):
            self._release_node(gone)

    def _release_node(self, node: PrefixNode) -> None:
        if node.gpu is not None:
            self._node_of[node.gpu] = None
            self.pool.discard(node.gpu)
        if self.host is not None:
            self.host.drop_node(node)

    def check_invariants(self) -> None:
        self._tree.check_invariants()
        nodes = list(self._tree.nodes())
        known = {node.gpu: node for node in nodes if node.gpu is not None}
        if known != {block: node for block, node in enumerate(self._node_of) if node is not None}:
            raise AssertionError("the tree and the blocks disagree")
        if any(not self.pool.is_shared(block) for block in known):
            raise AssertionError("a block of the tree may be written to")
        if self.host is not None:
            self.host.check_invariants(nodes)
