"""What is known by its tokens: a tree of the full blocks whose contents are kept, on the GPU, on the host or on both.

A node stands for one block of tokens behind those of its ancestors, so that a path from a root is a prefix. A node is
found by its very tokens, compared in full along the path: unlike a hash they cannot collide, nor be made to. Each salt
(a tenant) has a root of its own, and nothing is shared across roots. Children are kept in the order of their tokens:
among them the one with the longest beginning in common stands next to where the wanted tokens would stand.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator

TOKEN_BYTES = 4

ROOTS_BETWEEN_SWEEPS = 1024
"""Salts between two searches for those of which nothing is kept any more."""


class PrefixNode:
    """One block of tokens in its place.

    `gpu` and `host` are the blocks that hold its keys and values; a node with neither leaves the tree. `written_by` is
    the number of the step that has the block of the GPU written. `is_valid`: the model gave numbers, not NaN, to a
    token that saw it.
    """

    __slots__ = ("children", "depth", "gpu", "host", "in_tree", "is_valid", "keys", "parent", "tokens", "written_by")

    def __init__(self, parent: PrefixNode | None, tokens: bytes):
        self.parent = parent
        self.tokens = tokens  # uint32 of the most significant byte first: bytes order as their tokens do
        self.depth: int = 0 if parent is None else parent.depth + 1  # blocks from the root to here
        self.gpu: int | None = None
        self.host: int | None = None
        self.written_by = 0
        self.is_valid = False
        self.in_tree = True
        self.keys: list[bytes] = []
        self.children: list[PrefixNode] = []

    def child(self, tokens: bytes) -> PrefixNode | None:
        """The child of exactly these tokens."""
        index = bisect_left(self.keys, tokens)
        return self.children[index] if index < len(self.keys) and self.keys[index] == tokens else None

    def path(self) -> list[PrefixNode]:
        """From the root's child to here."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def subtree(self) -> Iterator[PrefixNode]:
        """This node and all below it."""
        open_nodes = [self]
        while open_nodes:
            node = open_nodes.pop()
            yield node
            open_nodes += node.children


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """As nodes hold them; quick for an array("I")."""
    packed = array("I", token_ids)
    if sys.byteorder == "little":
        packed.byteswap()
    return packed.tobytes()


class PrefixTree:
    """Knows nodes only: who holds their blocks, and when one is given away, is the pools' business."""

    def __init__(self, block_size: int):
        self._block_bytes = block_size * TOKEN_BYTES
        self._roots: dict[str, PrefixNode] = {}

    def root(self, salt: str) -> PrefixNode:
        """Where the prefixes of this salt begin."""
        if salt not in self._roots:
            if len(self._roots) % ROOTS_BETWEEN_SWEEPS == ROOTS_BETWEEN_SWEEPS - 1:
                self._drop_empty_roots()
            self._roots[salt] = PrefixNode(None, b"")
        return self._roots[salt]

    def find(self, salt: str, packed: bytes) -> tuple[list[PrefixNode], tuple[PrefixNode, int] | None]:
        """The nodes of the longest prefix of `packed` in whole blocks, and of the children of the last one the node
        that has most tokens in common with what follows, with how many they are (None where it has none)."""
        node = self._roots.get(salt)
        if node is None:
            return [], None
        nodes: list[PrefixNode] = []
        size = self._block_bytes
        for start in range(0, len(packed), size):
            tokens, keys = packed[start : start + size], node.keys
            index = bisect_left(keys, tokens)  # as in `child`, whose call would cost as much again
            if index == len(keys) or keys[index] != tokens:
                return nodes, _closest_child(node, tokens)
            node = node.children[index]
            nodes.append(node)
        return nodes, None

    def add(self, parent: PrefixNode, tokens: bytes) -> PrefixNode:
        """A new child; the parent has none of these tokens yet."""
        node = PrefixNode(parent, tokens)
        index = bisect_left(parent.keys, tokens)
        parent.keys.insert(index, tokens)
        parent.children.insert(index, node)
        return node

    def remove(self, node: PrefixNode) -> list[PrefixNode]:
        """Take a node out with all below it, which nothing leads to any more; returns them all."""
        removed = list(node.subtree())
        parent = node.parent
        index = bisect_left(parent.keys, node.tokens)
        del parent.keys[index], parent.children[index]
        for one in removed:
            one.in_tree = False
        return removed

    def remove_root(self, salt: str) -> list[PrefixNode]:
        """Forget a salt; returns the nodes that were below its root."""
        root = self._roots.pop(salt, None)
        removed = [] if root is None else list(root.subtree())
        for node in removed:
            node.in_tree = False
        return removed[1:]

    def nodes(self) -> Iterator[PrefixNode]:
        """All but the roots."""
        return (node for root in self._roots.values() for node in root.subtree() if node.parent is not None)

    def check_invariants(self) -> None:
        """Every node holds a whole block somewhere, stands where its tokens are looked for, and knows its depth."""
        for node in self.nodes():
            if node.gpu is None and node.host is None:
                raise AssertionError(f"a node at depth {node.depth} has no contents")
            if not node.in_tree or node.parent.child(node.tokens) is not node or node.depth != node.parent.depth + 1:
                raise AssertionError(f"a node at depth {node.depth} stands in the wrong place")
            if len(node.tokens) != self._block_bytes or node.keys != sorted({child.tokens for child in node.children}):
                raise AssertionError(f"the children of a node at depth {node.depth} are out of order")

    def _drop_empty_roots(self) -> None:
        """What runs below one of them is not remembered any more."""
        for salt in [salt for salt, root in self._roots.items() if not root.children]:
            self._roots.pop(salt).in_tree = False


def _closest_child(node: PrefixNode, tokens: bytes) -> tuple[PrefixNode, int] | None:
    index = bisect_left(node.keys, tokens)
    found = [(num_common_tokens(node.keys[at], tokens), at) for at in (index - 1, index) if 0 <= at < len(node.keys)]
    num_common, at = max(found, default=(0, 0))
    return (node.children[at], num_common) if num_common else None


def num_common_tokens(left: bytes, right: bytes) -> int:
    """How many whole tokens the two have in common at their beginnings."""
    size = min(len(left), len(right))
    differing = int.from_bytes(left[:size]) ^ int.from_bytes(right[:size])
    return (size - (differing.bit_length() + 7) // 8) // TOKEN_BYTES
