"""Host tier. Copies are recorded for the next plan, at most one transfer per direction.

Transfers in one direction finish in order, and hold their blocks in both tiers until then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from service.engine.kv.block_pool import BlockPool
from service.engine.kv.prefix_tree import PrefixNode
from service.engine.sequence import Sequence
from service.engine.step import BlockCopy


class _SwapOut(NamedTuple):
    node: PrefixNode
    gpu: int
    host: int


class HostCache:
    """Host copies of blocks in `gpu`. Waiting sequences pin theirs; others are evicted, least recently used first.
    `drop_subtree` removes a node without contents."""

    def __init__(self, gpu: BlockPool, drop_subtree: Callable[[PrefixNode], None]):
        self.pool = BlockPool(0, self._on_evict)
        self.num_blocks_out = self.num_blocks_in = 0
        self._gpu = gpu
        self._drop_subtree = drop_subtree
        self._node_of: dict[int, PrefixNode] = {}
        self._pins: dict[Sequence, list[int]] = {}
        self._swapping_out: dict[PrefixNode, int] = {}
        self._swapping_in: dict[int, int] = {}  # swap-in number by GPU block
        self._planned_outs: list[_SwapOut] = []
        self._planned_ins: list[BlockCopy] = []
        self._outs_in_flight: deque[list[_SwapOut]] = deque()
        self._ins_in_flight: deque[list[BlockCopy]] = deque()
        self._num_swap_ins_planned = self._num_swap_ins_done = 0

    @property
    def num_transfers_in_flight(self) -> int:
        return len(self._outs_in_flight) + len(self._ins_in_flight) + bool(self._planned_outs) + bool(self._planned_ins)

    @property
    def num_swapping_out(self) -> int:
        return len(self._swapping_out)

    @property
    def num_swapping_in(self) -> int:
        return len(self._swapping_in)

    def num_exclusive_swapping_out(self) -> int:
        """Count blocks being copied out that have no other holder."""
        return sum(not self._gpu.is_held_by_several(node.gpu_block()) for node in self._swapping_out)

    def holds(self, node: PrefixNode) -> bool:
        """Return True if the host holds the contents or a copy is under way."""
        return node.host is not None or node in self._swapping_out

    def num_transfers(self, node: PrefixNode) -> int:
        return (node in self._swapping_out) + (node.gpu in self._swapping_in)

    def copy_out(self, nodes: Iterable[PrefixNode]) -> None:
        """Copy nodes written by earlier steps, parents first, while host blocks last."""
        wanted = [node for node in nodes if not self.holds(node)]
        blocks = self.pool.allocate(min(len(wanted), self.pool.num_available))
        for node in wanted:
            if not blocks:
                break
            if node.in_tree:  # evicted by the allocation
                swap = _SwapOut(node, node.gpu_block(), blocks.pop())
                self._swapping_out[node] = swap.host
                self._gpu.share((swap.gpu,))
                self._planned_outs.append(swap)
        self.pool.release(blocks)

    def pin(self, holder: Sequence, nodes: Iterable[PrefixNode]) -> None:
        """Pin the host blocks of `nodes` for `holder`, up to the first missing one."""
        pinned = self._pins.setdefault(holder, [])
        for node in nodes:
            block = node.host if node.host is not None else self._swapping_out.get(node)
            if block is None:
                break
            self.pool.share((block,))
            pinned.append(block)

    def unpin(self, holder: Sequence) -> None:
        self.pool.release(self._pins.pop(holder, ()))

    def swap_in(self, nodes: Seq[PrefixNode], blocks: Seq[int]) -> None:
        for node, block in zip(nodes, blocks, strict=True):
            source = node.host_block()
            self.pool.share((source,))
            self._gpu.share((block,))
            self._planned_ins.append(BlockCopy(source, block))
            self._swapping_in[block] = self._num_swap_ins_planned + 1
            node.gpu = block

    def is_swapping_in(self, block: int) -> bool:
        return block in self._swapping_in

    def last_swap_in(self, blocks: Iterable[int]) -> int:
        """Return the number of the swap-in that completes these GPU blocks; 0 if complete."""
        return max((self._swapping_in.get(block, 0) for block in blocks), default=0)

    def is_swap_in_done(self, number: int) -> bool:
        return number <= self._num_swap_ins_done

    def drain_swaps(self) -> tuple[tuple[BlockCopy, ...], tuple[BlockCopy, ...]]:
        outs, ins = self._planned_outs, self._planned_ins
        if outs:
            self._outs_in_flight.append(outs)
            self.num_blocks_out += len(outs)
            self._planned_outs = []
        if ins:
            self._ins_in_flight.append(ins)
            self.num_blocks_in += len(ins)
            self._num_swap_ins_planned += 1
            self._planned_ins = []
        return tuple(BlockCopy(swap.gpu, swap.host) for swap in outs), tuple(ins)

    def complete_swap_out(self) -> None:
        done = self._outs_in_flight.popleft()
        for node, gpu, host in done:
            del self._swapping_out[node]
            if node.in_tree:
                node.host = host
                self._node_of[host] = node
                self.pool.retain(host)
                self._gpu.retain(gpu, is_saved=True)
        self.pool.release([swap.host for swap in done])
        self._gpu.release([swap.gpu for swap in done])

    def complete_swap_in(self) -> None:
        done = self._ins_in_flight.popleft()
        self._num_swap_ins_done += 1
        for copy in done:
            del self._swapping_in[copy.target]
        self.pool.release([copy.source for copy in done])
        self._gpu.release([copy.target for copy in done])

    def drop_node(self, node: PrefixNode) -> None:
        if node.host is not None:
            del self._node_of[node.host]
            self.pool.discard(node.host)
            node.host = None  # sequences may still read it

    def _on_evict(self, block: int) -> None:
        node = self._node_of.pop(block)
        node.host = None
        if node.gpu is None:
            self._drop_subtree(node)
        else:
            self._gpu.retain(node.gpu)

    @property
    def pinned(self) -> dict[Sequence, list[int]]:
        return self._pins

    @property
    def blocks_being_filled(self) -> Iterable[int]:
        return self._swapping_out.values()

    def gpu_holders(self) -> list[list[int]]:
        outs = [[swap.gpu for swap in flight] for flight in (*self._outs_in_flight, self._planned_outs)]
        return outs + [[copy.target for copy in flight] for flight in (*self._ins_in_flight, self._planned_ins)]

    def check_invariants(self, nodes: Iterable[PrefixNode]) -> None:
        outs = [[swap.host for swap in flight] for flight in (*self._outs_in_flight, self._planned_outs)]
        ins = [[copy.source for copy in flight] for flight in (*self._ins_in_flight, self._planned_ins)]
        self.pool.check_invariants([*self._pins.values(), *outs, *ins])
        if self._node_of != {node.host: node for node in nodes if node.host is not None}:
            raise AssertionError("the tree and the host's blocks disagree")
        if set(self._swapping_out.values()) != {block for flight in outs for block in flight}:
            raise AssertionError("swap-outs and transfers to the host disagree")
        if set(self._swapping_in) != {
            copy.target for flight in (*self._ins_in_flight, self._planned_ins) for copy in flight
        }:
            raise AssertionError("swap-ins and transfers from the host disagree")
