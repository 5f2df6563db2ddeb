"""The second tier: which blocks of the host hold what, who waits for them, and which copies are on their way.

Like the first tier it decides about blocks and moves nothing: copies are recorded for the plan of the step. One plan
asks for at most one transfer in each direction, and those of one direction end in their order. A transfer holds its
blocks in both tiers until it is seen done, so that nobody else gets them before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

from service.engine.kv.block_pool import BlockPool
from service.engine.kv.prefix_tree import Node
from service.engine.step import BlockCopy


class _Leaving(NamedTuple):
    node: Node
    gpu: int
    host: int


class HostTier:
    """The books of host memory for blocks of `gpu`, none at first. `drop` takes a node without contents from the tree.

    What a block of the host holds is found through its node, as on the GPU; a block that waiting sequences count on is
    pinned by them, the others are given away when room is needed, the one that nobody has used for longest first.
    """

    def __init__(self, gpu: BlockPool, drop: Callable[[Node], None]):
        self.pool = BlockPool(0, self._lose)
        self.num_blocks_out = self.num_blocks_in = 0
        self._gpu = gpu
        self._drop = drop
        self._node_of: dict[int, Node] = {}
        self._pins: dict[Hashable, list[int]] = {}
        self._leaving: dict[Node, int] = {}
        self._arriving: dict[int, int] = {}  # block of the GPU -> number of the transfer that brings it
        self._outs: list[_Leaving] = []
        self._ins: list[BlockCopy] = []
        self._out_flights: deque[list[_Leaving]] = deque()
        self._in_flights: deque[list[BlockCopy]] = deque()
        self._num_ins_asked = self._num_ins_done = 0

    @property
    def num_flights(self) -> int:
        """Transfers under way, or asked for and not yet in a plan."""
        return len(self._out_flights) + len(self._in_flights) + bool(self._outs) + bool(self._ins)

    @property
    def num_leaving(self) -> int:
        """Blocks whose copies to the host are planned or under way."""
        return len(self._leaving)

    @property
    def num_arriving(self) -> int:
        """Blocks whose copies from the host are planned or under way."""
        return len(self._arriving)

    def num_held_alone(self) -> int:
        """Of the blocks that are being copied to the host, those that nobody else holds."""
        return sum(not self._gpu.is_held_by_several(node.gpu) for node in self._leaving)

    def has(self, node: Node) -> bool:
        """Whether the host holds what the node stands for, or is about to."""
        return node.host is not None or node in self._leaving

    def num_transfers(self, node: Node) -> int:
        """How many transfers hold the node's block of the GPU."""
        return (node in self._leaving) + (node.gpu in self._arriving)

    def copy_out(self, nodes: Iterable[Node]) -> None:
        """Copy these blocks of the GPU to the host, as many of the first ones as there is room for.

        Their contents must be there before the step that is being planned; a node stands behind its parent.
        """
        wanted = [node for node in nodes if not self.has(node)]
        blocks = self.pool.take(min(len(wanted), self.pool.num_available))
        for node in wanted:
            if not blocks:
                break
            if node.in_tree:  # making room may have taken it out
                leaving = _Leaving(node, node.gpu, blocks.pop())
                self._leaving[node] = leaving.host
                self._gpu.share((node.gpu,))
                self._outs.append(leaving)
        self.pool.give_back(blocks)

    def pin(self, holder: Hashable, nodes: Iterable[Node]) -> None:
        """Keep what the host holds of these for the holder, up to the first that it does not hold."""
        pinned = self._pins.setdefault(holder, [])
        for node in nodes:
            block = node.host if node.host is not None else self._leaving.get(node)
            if block is None:
                break
            self.pool.share((block,))
            pinned.append(block)

    def unpin(self, holder: Hashable) -> None:
        """The holder counts on nothing any more."""
        self.pool.give_back(self._pins.pop(holder, ()))

    def bring(self, nodes: Sequence[Node], blocks: Sequence[int]) -> None:
        """Copy what only the host holds of these nodes to these blocks of the GPU, which somebody has taken."""
        for node, block in zip(nodes, blocks, strict=True):
            self.pool.share((node.host,))
            self._gpu.share((block,))
            self._ins.append(BlockCopy(node.host, block))
            self._arriving[block] = self._num_ins_asked + 1
            node.gpu = block

    def is_arriving(self, block: int) -> bool:
        """Whether a block of the GPU is still being written by a copy from the host."""
        return block in self._arriving

    def last_arrival(self, blocks: Iterable[int]) -> int:
        """The number of the transfer after which all of these are there, 0 where they are."""
        return max((self._arriving.get(block, 0) for block in blocks), default=0)

    def has_arrived(self, number: int) -> bool:
        """Whether the transfer of this number is done."""
        return number <= self._num_ins_done

    def take_moves(self) -> tuple[tuple[BlockCopy, ...], tuple[BlockCopy, ...]]:
        """The copies to the host and from it that have been asked for since the last call."""
        outs, ins = self._outs, self._ins
        if outs:
            self._out_flights.append(outs)
            self.num_blocks_out += len(outs)
            self._outs = []
        if ins:
            self._in_flights.append(ins)
            self.num_blocks_in += len(ins)
            self._num_ins_asked += 1
            self._ins = []
        return tuple(BlockCopy(leaving.gpu, leaving.host) for leaving in outs), tuple(ins)

    def settle_out(self) -> None:
        """The oldest transfer to the host is done: its nodes are there too."""
        done = self._out_flights.popleft()
        for node, _, host in done:
            del self._leaving[node]
            if node.in_tree:
                node.host = host
                self._node_of[host] = node
                self.pool.keep(host)
                self._gpu.keep(node.gpu, is_saved=True)
        self.pool.give_back([leaving.host for leaving in done])
        self._gpu.give_back([leaving.gpu for leaving in done])

    def settle_in(self) -> None:
        """The oldest transfer from the host is done."""
        done = self._in_flights.popleft()
        self._num_ins_done += 1
        for copy in done:
            del self._arriving[copy.target]
        self.pool.give_back([copy.source for copy in done])
        self._gpu.give_back([copy.target for copy in done])

    def forget(self, node: Node) -> None:
        """The node has left the tree."""
        if node.host is not None:
            del self._node_of[node.host]
            self.pool.forget(node.host)
            node.host = None  # whoever runs below it still asks

    def _lose(self, block: int) -> None:
        node = self._node_of.pop(block)
        node.host = None
        if node.gpu is None:
            self._drop(node)
        else:
            self._gpu.keep(node.gpu)

    @property
    def pinned(self) -> dict[Hashable, list[int]]:
        """Who counts on which blocks of the host; to look at."""
        return self._pins

    @property
    def filling(self) -> Iterable[int]:
        """Blocks of the host that copies fill; to look at."""
        return self._leaving.values()

    def gpu_holders(self) -> list[list[int]]:
        """The blocks of the GPU that transfers hold."""
        outs = [[leaving.gpu for leaving in flight] for flight in (*self._out_flights, self._outs)]
        return outs + [[copy.target for copy in flight] for flight in (*self._in_flights, self._ins)]

    def check_invariants(self, nodes: Iterable[Node]) -> None:
        """The host's blocks are where the tree says, and held by those who count on them and by transfers."""
        outs = [[leaving.host for leaving in flight] for flight in (*self._out_flights, self._outs)]
        ins = [[copy.source for copy in flight] for flight in (*self._in_flights, self._ins)]
        self.pool.check_invariants([*self._pins.values(), *outs, *ins])
        if self._node_of != {node.host: node for node in nodes if node.host is not None}:
            raise AssertionError("the tree and the host's blocks disagree")
        if set(self._leaving.values()) != {block for flight in outs for block in flight}:
            raise AssertionError("a block is on its way to the host and nobody knows")
        if set(self._arriving) != {copy.target for flight in (*self._in_flights, self._ins) for copy in flight}:
            raise AssertionError("a block is on its way from the host and nobody knows")
