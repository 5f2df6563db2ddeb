"""Block tables. Copies are recorded for the next plan."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from collections.abc import Sequence as Seq
from itertools import chain
from typing import NamedTuple

from service.engine.kv.block_pool import BlockPool, OutOfBlocks
from service.engine.kv.host_cache import HostCache
from service.engine.kv.prefix_cache import NO_MATCH, Match, PrefixCache
from service.engine.kv.prefix_tree import PrefixNode, pack_tokens
from service.engine.sequence import Sequence, SequenceStatus
from service.engine.step import BlockCopy, Chunk, FinishedTransfer

MAX_SAVED_PER_STEP = 256
"""About 10 ms on the bus."""


SwapInRule = Callable[[int, int], bool]
"""(num_tokens, num_blocks): see PrefixCache.match."""


def always(num_tokens: int, num_blocks: int) -> bool:
    return True


class SwapFootprint(NamedTuple):
    """Cached blocks of the sequences to preempt; shared blocks count once."""

    num_cached: int
    num_to_save: int
    num_exclusive: int


class KVManager:
    """Block tables on the GPU, with an optional host tier.

    Full blocks of known tokens are cached. A sequence starts from its longest cached prefix: with `prefix_caching` any
    prefix with its salt, else only its own from before a preemption. The cached part of a table is a path in the prefix
    tree. `format_key` names the cache's dtype and scales (`KvFormat`).
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        block_bytes: int = 0,
        format_key: str = "",
        prefix_caching: bool = False,
        swapping: bool = False,
    ):
        self.block_size = block_size
        self.block_bytes = block_bytes
        self._format_key = format_key
        self.num_copies = 0
        self.num_query_tokens = self.num_hit_tokens = 0
        self._prefix_caching = prefix_caching
        self._copies: list[BlockCopy] = []
        cache = PrefixCache(num_blocks, block_size, with_host=swapping)
        self._cache = cache if prefix_caching or swapping else None
        self.pool: BlockPool = cache.pool
        self.host: HostCache | None = cache.host
        self._tails: dict[Sequence, PrefixNode] = {}  # node of the last cached block
        self._swap_in_ids: dict[Sequence, int] = {}  # swap-in number to wait for
        self._copied: dict[Sequence, dict[int, BlockCopy]] = {}  # by index in the table

    def start_step(self) -> None:
        if self._cache is not None:
            self._cache.start_step()

    def match(self, sequence: Sequence, should_swap_in: SwapInRule = always) -> Match:
        """Return the cached prefix, without the last token."""
        if self._cache is None:
            return NO_MATCH
        token_ids = sequence.token_ids[: sequence.num_tokens - 1]
        return self._cache.match(self._salt(sequence), token_ids, should_swap_in)

    def num_blocks_for_match(self, sequence: Sequence, match: Match) -> int:
        """Return the blocks needed to `attach` the match and `extend` to all tokens."""
        shared = match.on_gpu
        missing = -(-sequence.num_tokens // self.block_size) - len(shared) + (match.partial is not None)
        return missing + self.pool.num_unreferenced(shared)

    def match_within_blocks(self, sequence: Sequence, num_blocks: int, should_swap_in: SwapInRule = always) -> Match:
        """Like `match`, but drop a partial-block hit if copying it would exceed `num_blocks`."""
        match = self.match(sequence, should_swap_in)
        if match.partial is None or self.num_blocks_for_match(sequence, match) <= num_blocks:
            return match
        return Match.of(match.nodes, None, len(match.nodes) * self.block_size)

    def can_attach(self, match: Match) -> bool:
        return len(match.on_host) + self.pool.num_unreferenced(match.on_gpu) <= self.pool.num_available

    def attach(self, sequence: Sequence, match: Match) -> None:
        """Attach a match, computable once out of `swapping_in`. Raises OutOfBlocks, changing nothing."""
        if self._cache is None:
            return
        shared, absent = match.on_gpu, match.on_host
        if not self.can_attach(match):
            raise OutOfBlocks(f"{len(absent)} blocks needed to swap in")
        self.pool.share(shared)  # before the swap-in can evict them
        if absent:
            self._cache.swap_in(absent)
        self.unpin_host(sequence)
        path = [*match.nodes, match.partial] if match.partial else match.nodes
        sequence.block_table.extend([node.gpu_block() for node in path] if absent else shared)
        sequence.num_computed_tokens, sequence.num_exclusive_tokens = match.num_tokens, 0
        self._tails[sequence] = match.nodes[-1] if match.nodes else self._cache.root(self._salt(sequence))
        self._record_swap_in(sequence)
        if self._prefix_caching and sequence.group.num_cached_tokens is None:
            num_hits = sequence.group.num_cached_tokens = min(match.num_tokens, sequence.num_prompt_tokens)
            self.num_query_tokens += sequence.num_prompt_tokens
            self.num_hit_tokens += num_hits

    @property
    def _host_cache(self) -> HostCache:
        if self.host is None:
            raise AssertionError("there is no host cache")
        return self.host

    def swapping_in(self) -> Set[Sequence]:
        """Return the sequences waiting for blocks from the host."""
        for sequence in [one for one, number in self._swap_in_ids.items() if self._host_cache.is_swap_in_done(number)]:
            del self._swap_in_ids[sequence]
        return self._swap_in_ids.keys()

    def num_missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        """Return the number of blocks `extend` would allocate."""
        table, size = sequence.block_table, self.block_size
        first, end = sequence.num_computed_tokens // size, -(-num_tokens // size)
        if end == first + 1 <= len(table):
            return int(self.pool.is_shared(table[first]))
        return max(0, end - len(table)) + sum(map(self.pool.is_shared, table[first:end]))

    def extend(self, sequence: Sequence, num_tokens: int) -> None:
        """Allocate blocks up to `num_tokens`, copying shared ones on write. Raises OutOfBlocks, changing nothing."""
        missing, size = self.num_missing_blocks(sequence, num_tokens), self.block_size
        end = -(-num_tokens // size)
        if missing:
            table, fresh = sequence.block_table, self.pool.allocate(missing)
            for index in range(sequence.num_computed_tokens // size, min(end, len(table))):
                if self.pool.is_shared(table[index]):
                    copy = BlockCopy(table[index], fresh[-1])
                    self._copies.append(copy)
                    self._copied.setdefault(sequence, {})[index] = copy
                    self.pool.release((table[index],))
                    table[index] = fresh.pop()
                    self.num_copies += 1
            table.extend(fresh)
        sequence.num_exclusive_tokens = end * size

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Start a child from the parent's first `num_tokens` tokens, sharing any partial block."""
        child.block_table.extend(parent.block_table[: -(-num_tokens // self.block_size)])
        self.pool.share(child.block_table)
        child.num_computed_tokens = num_tokens
        parent.num_exclusive_tokens = child.num_exclusive_tokens = 0
        if parent in self._tails:
            self._tails[child] = _ancestor(self._tails[parent], num_tokens // self.block_size)
            self._record_swap_in(child)
            self.unpin_host(child)

    def awaits_copy(self, sequence: Sequence) -> bool:
        """Return True if the next plan copies into a block of the sequence."""
        return any(copy.target in sequence.block_table for copy in self._copies)

    def copied_from(self, sequence: Sequence) -> dict[int, int]:
        """Return the source of each copied-on-write block by its index in the table."""
        table, copies = sequence.block_table, self._copied.get(sequence, {})
        return {index: copy.source for index, copy in copies.items() if table[index] == copy.target}

    def drain_copies(self) -> tuple[BlockCopy, ...]:
        copies, self._copies = tuple(self._copies), []
        return copies

    def cache_blocks(self, sequence: Sequence, num_tokens: int) -> None:
        """Make this plan's full blocks available as prefix hits."""
        tail = self._tails.get(sequence)
        if tail is not None:
            self._tails[sequence] = self._extend_tail(sequence, tail, num_tokens, may_replace=False)

    def commit_step(self, chunks: Iterable[Chunk], failed: Set[Sequence]) -> None:
        """Cache the blocks a finished step filled; for `failed` sequences (NaN logits), drop those after the last valid
        one."""
        if self._cache is None:
            return
        size = self.block_size
        for sequence, start, length, samples, drafts in chunks:
            if length == 1 and (start + 1) % size and sequence not in failed:
                continue  # no block completed
            tail, end = self._tails.get(sequence), start + length - len(drafts)
            if tail is None or sequence.status is not SequenceStatus.RUNNING or sequence.num_computed_tokens < end:
                continue  # preempted since
            if sequence in failed:
                self._cache.invalidate_unproven(tail)
                continue
            tail = self._tails[sequence] = self._extend_tail(sequence, tail, end, may_replace=True)
            if samples:
                self._cache.mark_valid(tail)

    def accept_drafts(self, sequence: Sequence, count: int) -> None:
        """Count accepted drafts as computed; no effect after a preemption."""
        if sequence.status is not SequenceStatus.RUNNING or not count:
            return
        num_blocks = sequence.num_computed_tokens // self.block_size
        sequence.num_computed_tokens += count
        tail = self._tails.get(sequence)
        is_filled = sequence.num_computed_tokens // self.block_size > num_blocks
        if tail is not None and self._cache is not None and is_filled:
            tail = self._extend_tail(sequence, tail, sequence.num_computed_tokens, may_replace=True)
            self._tails[sequence] = tail
            self._cache.mark_valid(tail)

    def retract_token(self, sequence: Sequence) -> None:
        """Mark the last token uncomputed after a step that returned none."""
        if sequence.status is SequenceStatus.RUNNING:
            num_computed = sequence.num_computed_tokens = min(sequence.num_computed_tokens, sequence.num_tokens - 1)
            sequence.num_exclusive_tokens = 0
            if sequence in self._tails:
                self._tails[sequence] = _ancestor(self._tails[sequence], num_computed // self.block_size)

    def swap_out(self, sequence: Sequence) -> None:
        """Release the sequence, pinning its cached blocks on the host until it is attached or ends."""
        path = self._tails[sequence].path() if sequence in self._tails else []
        self.release(sequence)
        host = self._host_cache
        host.pin(sequence, path)
        host.copy_out(path)
        host.unpin(sequence)
        host.pin(sequence, path)

    def swap_footprint(self, sequences: Iterable[Sequence]) -> SwapFootprint:
        host = self._host_cache
        paths = chain.from_iterable(self._tails[one].path() for one in sequences if one in self._tails)
        holders = Counter(node for node in paths if node.in_tree)
        return SwapFootprint(
            num_cached=len(holders),
            num_to_save=sum(not host.holds(node) for node in holders),
            num_exclusive=sum(
                self.pool.num_holders(node.gpu_block()) == count + host.num_transfers(node)
                for node, count in holders.items()
            ),
        )

    @property
    def shares_prefixes(self) -> bool:
        return self._prefix_caching

    def num_missing_for_all(self, sequence: Sequence) -> int:
        if sequence.is_waiting_for_leader:
            return -(-sequence.num_tokens // self.block_size) - sequence.num_inherited_tokens // self.block_size
        return self.num_missing_blocks(sequence, sequence.num_tokens)

    def num_freed_blocks(self, sequences: Iterable[Sequence]) -> int:
        return self.pool.num_freed(one.block_table for one in sequences)

    def num_returning_blocks(self) -> int:
        """Return the blocks that copies out will free."""
        return 0 if self.host is None else self.host.num_exclusive_swapping_out()

    def save_to_host(self, sequence: Sequence) -> None:
        tail = self._tails.get(sequence)
        if tail is not None and self._cache is not None:
            host, cache = self._host_cache, self._cache
            unsaved = [node for node in tail.path() if not host.holds(node) and cache.is_written(node)]
            host.copy_out(unsaved[:MAX_SAVED_PER_STEP])

    def save_cached(self, count: int) -> None:
        if self._cache is not None:
            self._host_cache.copy_out(self._cache.oldest_unsaved(min(count, MAX_SAVED_PER_STEP)))

    def complete_transfer(self, done: FinishedTransfer) -> None:
        if done.is_out:
            self._host_cache.complete_swap_out()
        else:
            self._host_cache.complete_swap_in()

    def drain_swaps(self) -> tuple[tuple[BlockCopy, ...], tuple[BlockCopy, ...]]:
        return ((), ()) if self.host is None else self.host.drain_swaps()

    def unpin_host(self, sequence: Sequence) -> None:
        if self.host is not None:
            self.host.unpin(sequence)

    def drop_request(self, sequence: Sequence) -> None:
        if self._cache is not None and not self._prefix_caching:
            self._cache.drop_salt(self._salt(sequence))

    def release(self, sequence: Sequence) -> None:
        self._tails.pop(sequence, None)
        self._swap_in_ids.pop(sequence, None)
        self._copied.pop(sequence, None)
        self.unpin_host(sequence)
        self.pool.release(sequence.block_table)
        del sequence.block_table[:]
        sequence.num_computed_tokens = sequence.num_exclusive_tokens = 0

    def num_slots(self, sequences: Iterable[Sequence]) -> tuple[int, int]:
        """Return (held, filled) token slots; shared blocks count once."""
        size = self.block_size
        empty: dict[int, int] = {}
        for sequence in sequences:
            table, num_computed = sequence.block_table, sequence.num_computed_tokens
            for index in range(num_computed // size, len(table)):
                unfilled = min(size, (index + 1) * size - num_computed)
                empty[table[index]] = min(unfilled, empty.get(table[index], size))
        held = self.pool.num_used * size
        return held, held - sum(empty.values())

    def _salt(self, sequence: Sequence) -> str:
        """Return the key of the sequence's tree root: another cache format, adapter or rope never matches."""
        group, owner = sequence.group, sequence.request.cache_salt if self._prefix_caching else sequence.request_id
        return f"{self._format_key}\n{group.adapter_key}\n{group.first_rope_row}\n{owner}"

    def _extend_tail(self, sequence: Sequence, tail: PrefixNode, num_tokens: int, *, may_replace: bool) -> PrefixNode:
        if self._cache is None:
            return tail
        end = min(num_tokens, len(sequence.token_ids)) // self.block_size
        table, first = sequence.block_table, tail.depth
        before = table[first:end]
        tail = self._cache.insert(tail, sequence.token_ids, table, end, may_replace=may_replace)
        if table[first:end] != before:
            sequence.num_exclusive_tokens = 0
        return tail

    def _record_swap_in(self, sequence: Sequence) -> None:
        number = 0 if self.host is None else self.host.last_swap_in(sequence.block_table)
        if number:
            self._swap_in_ids[sequence] = number

    def check_invariants(self, sequences: Iterable[Sequence]) -> None:
        sequences = list(sequences)
        holders: list[Seq[int]] = [sequence.block_table for sequence in sequences]
        if self.host is not None:
            holders += self.host.gpu_holders()
        self.pool.check_invariants(holders)
        check_tables(sequences, self.pool, self.block_size)
        if self._cache is not None:
            self._cache.check_invariants()
            check_tails(self._tails, sequences, self.block_size)


def _ancestor(node: PrefixNode, max_depth: int) -> PrefixNode:
    while node.depth > max_depth and node.parent is not None:
        node = node.parent
    return node


def check_tables(sequences: Iterable[Sequence], pool: BlockPool, block_size: int) -> None:
    """Raise AssertionError for missing blocks or shared writable ones."""
    for sequence in sequences:
        if sequence.num_computed_tokens > len(sequence.block_table) * block_size:
            raise AssertionError(f"{sequence.request_id}: computed tokens without a block")
        writable = range(sequence.num_computed_tokens, sequence.num_exclusive_tokens, block_size)
        if any(pool.is_shared(sequence.block_table[at // block_size]) for at in writable):
            raise AssertionError(f"{sequence.request_id}: a block counts as exclusive and is shared")


def check_tails(tails: Mapping[Sequence, PrefixNode], sequences: Iterable[Sequence], block_size: int) -> None:
    if not tails.keys() <= set(sequences):
        raise AssertionError("a sequence without blocks has a path in the tree")
    for sequence, tail in tails.items():
        check_path(sequence.request_id, tail, sequence.token_ids[: tail.depth * block_size], sequence.block_table)


def check_path(name: str, tail: PrefixNode, token_ids: Iterable[int], table: array[int]) -> None:
    path = tail.path()
    if b"".join(node.tokens for node in path) != pack_tokens(token_ids):
        raise AssertionError(f"{name}: its path in the tree is not that of its tokens")
    if tail.in_tree and [node.gpu for node in path] != list(table[: tail.depth]):
        raise AssertionError(f"{name} does not hold the blocks of its path")
