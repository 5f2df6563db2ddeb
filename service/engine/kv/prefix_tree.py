"""The prefix tree: full blocks of tokens whose contents are cached on the GPU, on the host or on both.

A node is one block of tokens after those of its ancestors, so a path from a root is a prefix. Lookup compares the
tokens themselves along the path: unlike hashes they cannot collide. Each salt has a root of its own; roots share
nothing. Children are sorted by their tokens, so the child with the longest common prefix is next to the insertion
point.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator

TOKEN_BYTES = 4

ROOTS_BETWEEN_SWEEPS = 1024
"""New salts between two sweeps of roots without children."""


class PrefixNode:
    """One block of tokens at its position.

    `gpu` and `host` are the blocks that hold its keys and values; a node with neither leaves the tree. `written_by` is
    the number of the step that writes the GPU block. `is_valid`: the model returned finite logits for a token that
    attends to it.
    """

    __slots__ = ("children", "depth", "gpu", "host", "in_tree", "is_valid", "keys", "parent", "tokens", "written_by")

    def __init__(self, parent: PrefixNode | None, tokens: bytes):
        self.parent = parent
        self.tokens = tokens  # big-endian uint32: bytes sort as their tokens do
        self.depth: int = 0 if parent is None else parent.depth + 1  # in blocks
        self.gpu: int | None = None
        self.host: int | None = None
        self.written_by = 0
        self.is_valid = False
        self.in_tree = True
        self.keys: list[bytes] = []
        self.children: list[PrefixNode] = []

    def child(self, tokens: bytes) -> PrefixNode | None:
        """Return the child with exactly these tokens."""
        index = bisect_left(self.keys, tokens)
        return self.children[index] if index < len(self.keys) and self.keys[index] == tokens else None

    def path(self) -> list[PrefixNode]:
        """Return the nodes from the root's child to this one."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def subtree(self) -> Iterator[PrefixNode]:
        """Yield this node and all its descendants."""
        open_nodes = [self]
        while open_nodes:
            node = open_nodes.pop()
            yield node
            open_nodes += node.children


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Pack token ids as nodes store them; fast for an array("I")."""
    packed = array("I", token_ids)
    if sys.byteorder == "little":
        packed.byteswap()
    return packed.tobytes()


class PrefixTree:
    """Manages nodes only; the pools decide which blocks are held and evicted."""

    def __init__(self, block_size: int):
        self._block_bytes = block_size * TOKEN_BYTES
        self._roots: dict[str, PrefixNode] = {}

    def root(self, salt: str) -> PrefixNode:
        """Return the root of this salt's prefixes."""
        if salt not in self._roots:
            if len(self._roots) % ROOTS_BETWEEN_SWEEPS == ROOTS_BETWEEN_SWEEPS - 1:
                self._drop_empty_roots()
            self._roots[salt] = PrefixNode(None, b"")
        return self._roots[salt]

    def find(self, salt: str, packed: bytes) -> tuple[list[PrefixNode], tuple[PrefixNode, int] | None]:
        """Return the nodes of the longest prefix of `packed` in whole blocks, and the child of the last one that shares
        most of the following tokens, with their number (None if none does)."""
        node = self._roots.get(salt)
        if node is None:
            return [], None
        nodes: list[PrefixNode] = []
        size = self._block_bytes
        for start in range(0, len(packed), size):
            tokens, keys = packed[start : start + size], node.keys
            index = bisect_left(keys, tokens)  # inlined `child`: a call would double the cost
            if index == len(keys) or keys[index] != tokens:
                return nodes, _closest_child(node, tokens)
            node = node.children[index]
            nodes.append(node)
        return nodes, None

    def add(self, parent: PrefixNode, tokens: bytes) -> PrefixNode:
        """Add a child; the parent has none with these tokens yet."""
        node = PrefixNode(parent, tokens)
        index = bisect_left(parent.keys, tokens)
        parent.keys.insert(index, tokens)
        parent.children.insert(index, node)
        return node

    def remove(self, node: PrefixNode) -> list[PrefixNode]:
        """Remove a node and its descendants; return them."""
        removed = list(node.subtree())
        parent = node.parent
        index = bisect_left(parent.keys, node.tokens)
        del parent.keys[index], parent.children[index]
        for one in removed:
            one.in_tree = False
        return removed

    def remove_root(self, salt: str) -> list[PrefixNode]:
        """Remove a salt; return the nodes below its root."""
        root = self._roots.pop(salt, None)
        removed = [] if root is None else list(root.subtree())
        for node in removed:
            node.in_tree = False
        return removed[1:]

    def nodes(self) -> Iterator[PrefixNode]:
        """Yield all nodes but the roots."""
        return (node for root in self._roots.values() for node in root.subtree() if node.parent is not None)

    def check_invariants(self) -> None:
        """Raise AssertionError unless every node has a block, is found by its tokens and knows its depth."""
        for node in self.nodes():
            if node.gpu is None and node.host is None:
                raise AssertionError(f"a node at depth {node.depth} has no contents")
            if not node.in_tree or node.parent.child(node.tokens) is not node or node.depth != node.parent.depth + 1:
                raise AssertionError(f"a node at depth {node.depth} is in the wrong position")
            if len(node.tokens) != self._block_bytes or node.keys != sorted({child.tokens for child in node.children}):
                raise AssertionError(f"the children of a node at depth {node.depth} are out of order")

    def _drop_empty_roots(self) -> None:
        """Sequences that run below a dropped root are not cached any more."""
        for salt in [salt for salt, root in self._roots.items() if not root.children]:
            self._roots.pop(salt).in_tree = False


def _closest_child(node: PrefixNode, tokens: bytes) -> tuple[PrefixNode, int] | None:
    index = bisect_left(node.keys, tokens)
    found = [(num_common_tokens(node.keys[at], tokens), at) for at in (index - 1, index) if 0 <= at < len(node.keys)]
    num_common, at = max(found, default=(0, 0))
    return (node.children[at], num_common) if num_common else None


def num_common_tokens(left: bytes, right: bytes) -> int:
    """Number of whole tokens at the start that both have in common."""
    size = min(len(left), len(right))
    differing = int.from_bytes(left[:size]) ^ int.from_bytes(right[:size])
    return (size - (differing.bit_length() + 7) // 8) // TOKEN_BYTES
