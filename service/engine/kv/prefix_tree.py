"""Prefix tree of token blocks, with one root per salt.

Lookup compares tokens, so unlike hashes it cannot collide. Children are sorted: the closest match is next to the
insertion point.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator

TOKEN_BYTES = 4

ROOTS_BETWEEN_SWEEPS = 1024


class PrefixNode:
    """One block of tokens. Step `written_by` writes `gpu`. `is_valid`: a token attending to it had finite logits."""

    __slots__ = ("children", "depth", "gpu", "host", "in_tree", "is_valid", "keys", "parent", "tokens", "written_by")

    def __init__(self, parent: PrefixNode | None, tokens: bytes):
        self.parent = parent
        self.tokens = tokens  # big-endian uint32: bytes sort like tokens
        self.depth: int = 0 if parent is None else parent.depth + 1  # in blocks
        self.gpu: int | None = None
        self.host: int | None = None
        self.written_by = 0
        self.is_valid = False
        self.in_tree = True
        self.keys: list[bytes] = []
        self.children: list[PrefixNode] = []

    def child(self, tokens: bytes) -> PrefixNode | None:
        index = bisect_left(self.keys, tokens)
        return self.children[index] if index < len(self.keys) and self.keys[index] == tokens else None

    def gpu_block(self) -> int:
        if self.gpu is None:
            raise AssertionError(f"a node at depth {self.depth} has no GPU block")
        return self.gpu

    def host_block(self) -> int:
        if self.host is None:
            raise AssertionError(f"a node at depth {self.depth} has no host block")
        return self.host

    def path(self) -> list[PrefixNode]:
        """Return the nodes below the root, down to this one."""
        nodes: list[PrefixNode] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def subtree(self) -> Iterator[PrefixNode]:
        open_nodes = [self]
        while open_nodes:
            node = open_nodes.pop()
            yield node
            open_nodes += node.children


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Pack as big-endian uint32."""
    packed = array("I", token_ids)
    if sys.byteorder == "little":
        packed.byteswap()
    return packed.tobytes()


class PrefixTree:
    def __init__(self, block_size: int):
        self._block_bytes = block_size * TOKEN_BYTES
        self._roots: dict[str, PrefixNode] = {}

    def root(self, salt: str) -> PrefixNode:
        if salt not in self._roots:
            if len(self._roots) % ROOTS_BETWEEN_SWEEPS == ROOTS_BETWEEN_SWEEPS - 1:
                self._drop_empty_roots()
            self._roots[salt] = PrefixNode(None, b"")
        return self._roots[salt]

    def find(self, salt: str, packed: bytes) -> tuple[list[PrefixNode], tuple[PrefixNode, int] | None]:
        """Return the longest prefix in full blocks, then the child sharing the most further tokens and their number."""
        node = self._roots.get(salt)
        if node is None:
            return [], None
        nodes: list[PrefixNode] = []
        size = self._block_bytes
        for start in range(0, len(packed), size):
            tokens, keys = packed[start : start + size], node.keys
            index = bisect_left(keys, tokens)  # `child`, inlined: twice as fast
            if index == len(keys) or keys[index] != tokens:
                return nodes, _closest_child(node, tokens)
            node = node.children[index]
            nodes.append(node)
        return nodes, None

    def add(self, parent: PrefixNode, tokens: bytes) -> PrefixNode:
        node = PrefixNode(parent, tokens)
        index = bisect_left(parent.keys, tokens)
        parent.keys.insert(index, tokens)
        parent.children.insert(index, node)
        return node

    def remove(self, node: PrefixNode) -> list[PrefixNode]:
        removed = list(node.subtree())
        parent = node.parent
        if parent is not None:
            index = bisect_left(parent.keys, node.tokens)
            del parent.keys[index], parent.children[index]
        for one in removed:
            one.in_tree = False
        return removed

    def remove_root(self, salt: str) -> list[PrefixNode]:
        root = self._roots.pop(salt, None)
        removed = [] if root is None else list(root.subtree())
        for node in removed:
            node.in_tree = False
        return removed[1:]

    def nodes(self) -> Iterator[PrefixNode]:
        return (node for root in self._roots.values() for node in root.subtree() if node.parent is not None)

    def check_invariants(self) -> None:
        for node in self.nodes():
            if node.gpu is None and node.host is None:
                raise AssertionError(f"a node at depth {node.depth} has no contents")
            parent = node.parent
            if parent is None or parent.child(node.tokens) is not node or node.depth != parent.depth + 1:
                raise AssertionError(f"a node at depth {node.depth} is in the wrong position")
            if not node.in_tree:
                raise AssertionError(f"a node at depth {node.depth} is in the wrong position")
            if len(node.tokens) != self._block_bytes or node.keys != sorted({child.tokens for child in node.children}):
                raise AssertionError(f"the children of a node at depth {node.depth} are out of order")

    def _drop_empty_roots(self) -> None:
        # Sequences below a dropped root are no longer cached.
        for salt in [salt for salt, root in self._roots.items() if not root.children]:
            self._roots.pop(salt).in_tree = False


def _closest_child(node: PrefixNode, tokens: bytes) -> tuple[PrefixNode, int] | None:
    index = bisect_left(node.keys, tokens)
    found = [(num_common_tokens(node.keys[at], tokens), at) for at in (index - 1, index) if 0 <= at < len(node.keys)]
    num_common, at = max(found, default=(0, 0))
    return (node.children[at], num_common) if num_common else None


def num_common_tokens(left: bytes, right: bytes) -> int:
    size = min(len(left), len(right))
    differing = int.from_bytes(left[:size]) ^ int.from_bytes(right[:size])
    return (size - (differing.bit_length() + 7) // 8) // TOKEN_BYTES
