"""KV cache policies of `quire bench memory`: paging, and the PagedAttention paper's baselines.

The paper is Kwon et al., SOSP 2023, sections 3.1 and 6.1. Each policy is a KV manager under the same scheduler, engine
and kernels: a contiguous region is a block table of consecutive ids. Static policies also form batches. Prefixes are
not cached.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from service.engine.kv.block_pool import OutOfBlocks
from service.engine.kv.kv_manager import KVManager
from service.engine.kv.prefix_cache import Match
from service.engine.sequence import Sequence
from service.errors import StartupError


class Regions(ABC):
    """Allocator of block id ranges, with a `BlockPool`'s counts."""

    num_cached = num_shared = 0

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self._taken: set[range] = set()

    @property
    @abstractmethod
    def num_free(self) -> int: ...

    @property
    def num_available(self) -> int:
        return self.num_free

    @property
    def num_used(self) -> int:
        """Number of blocks in regions, including rounding."""
        return self.num_blocks - self.num_free

    @abstractmethod
    def fits(self, count: int) -> bool:
        """Return whether `take(count)` would succeed."""

    @abstractmethod
    def take(self, count: int) -> range:
        """Allocate at least `count` blocks. Raises OutOfBlocks if no hole is large enough."""

    @abstractmethod
    def give_back(self, region: range) -> None:
        """Free a region exactly as it was taken."""

    @abstractmethod
    def check_invariants(self) -> None:
        """Check that regions and holes partition the pool and that adjacent holes are merged."""


class BestFit(Regions):
    """Best fit: cuts a region from the first smallest hole that is large enough; adjacent holes merge."""

    def __init__(self, num_blocks: int):
        super().__init__(num_blocks)
        self._holes = [range(num_blocks)] if num_blocks else []

    @property
    def num_free(self) -> int:
        return sum(map(len, self._holes))

    def fits(self, count: int) -> bool:
        return any(len(hole) >= count for hole in self._holes)

    def take(self, count: int) -> range:
        holes = [hole for hole in self._holes if len(hole) >= count]
        if not holes or count < 1:
            raise OutOfBlocks(f"no hole of {count} blocks")
        hole = min(holes, key=len)
        region, rest = hole[:count], hole[count:]
        at = self._holes.index(hole)
        self._holes[at : at + 1] = [rest] if rest else []
        self._taken.add(region)
        return region

    def give_back(self, region: range) -> None:
        _expect_taken(self._taken, region)
        at = bisect_left(self._holes, region.start, key=lambda hole: hole.start)
        first, last = at, at
        if at and self._holes[at - 1].stop == region.start:
            first = at - 1
        if at < len(self._holes) and self._holes[at].start == region.stop:
            last = at + 1
        merged = [*self._holes[first:at], region, *self._holes[at:last]]
        self._holes[first:last] = [range(merged[0].start, merged[-1].stop)]

    def check_invariants(self) -> None:
        _check_tiling(self.num_blocks, self._holes, self._taken)
        for left, right in zip(self._holes, self._holes[1:], strict=False):
            if left.stop >= right.start:
                raise AssertionError(f"holes {left} and {right} are one or out of order")


class Buddy(Regions):
    """Buddy allocator: aligned regions of power-of-two size.

    Larger holes are halved until they fit; free halves merge. A pool of another size is a row of such holes, largest
    first.
    """

    def __init__(self, num_blocks: int):
        super().__init__(num_blocks)
        self._holes: dict[int, list[int]] = {1 << order: [] for order in range(num_blocks.bit_length())}
        start = 0
        for size in sorted(self._holes, reverse=True):
            if num_blocks & size:
                self._holes[size].append(start)
                start += size

    @property
    def num_free(self) -> int:
        return sum(size * len(starts) for size, starts in self._holes.items())

    def fits(self, count: int) -> bool:
        return any(starts for size, starts in self._holes.items() if size >= count)

    def take(self, count: int) -> range:
        sizes = [size for size, starts in self._holes.items() if starts and size >= count]
        if not sizes or count < 1:
            raise OutOfBlocks(f"no hole of {count} blocks")
        size = min(sizes)
        start = self._holes[size].pop(0)
        while size >= 2 * count:
            size //= 2
            insort(self._holes[size], start + size)
        region = range(start, start + size)
        self._taken.add(region)
        return region

    def give_back(self, region: range) -> None:
        _expect_taken(self._taken, region)
        start, size = region.start, len(region)
        while (start ^ size) in self._holes.get(size, ()):
            self._holes[size].remove(start ^ size)
            start &= ~size
            size *= 2
        insort(self._holes[size], start)

    def check_invariants(self) -> None:
        holes = [range(start, start + size) for size, starts in self._holes.items() for start in starts]
        _check_tiling(self.num_blocks, holes, self._taken)
        for size, starts in self._holes.items():
            if starts != sorted(starts) or any(start % size for start in starts):
                raise AssertionError(f"holes of {size} blocks are out of order or not aligned")
            if any(start ^ size in starts for start in starts):
                raise AssertionError(f"two halves of {2 * size} blocks are both free and not one")


def _expect_taken(taken: set[range], region: range) -> None:
    if region not in taken:
        raise AssertionError(f"{region} was not taken, or is given back twice")
    taken.remove(region)


def _check_tiling(num_blocks: int, holes: list[range], taken: set[range]) -> None:
    end = 0
    for piece in sorted([*holes, *taken], key=lambda piece: piece.start):
        if piece.start != end:
            raise AssertionError(
                f"blocks {min(end, piece.start)}..{max(end, piece.start)} are in none or in two pieces"
            )
        end = piece.stop
    if end != num_blocks:
        raise AssertionError(f"the pieces end at block {end} of {num_blocks}")


ALLOCATORS: dict[str, Callable[[int], Regions]] = {"best-fit": BestFit, "buddy": Buddy}


class Holding(NamedTuple):
    """Slots held by one sequence."""

    given: int  # requested by its policy
    taken: int  # allocated, including rounding


class ContiguousKV(KVManager):
    """KV manager with one region of `wanted_slots` slots per sequence.

    With `grows`, a region only reserves memory: slots count as held once a sequence fills them.
    """

    def __init__(
        self, block_size: int, regions: Regions, wanted_slots: Callable[[Sequence], int], *, grows: bool = False
    ):
        super().__init__(0, block_size)
        self.pool = regions  # type: ignore[assignment]  # counts like a BlockPool; its ids are taken by region
        self.regions = regions
        self._wanted_slots = wanted_slots
        self._grows = grows
        self._regions: dict[Sequence, range] = {}

    def num_blocks_for_match(self, sequence: Sequence, match: Match) -> int:
        """Return the blocks of the sequence's region, or more than the pool has if no hole is large enough."""
        wanted = self._wanted_blocks(sequence)
        return wanted if self.regions.fits(wanted) else self.regions.num_blocks + 1

    def num_missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        """Return 0 for a running sequence, whose region is complete."""
        return 0 if sequence in self._regions else self._wanted_blocks(sequence)

    def extend(self, sequence: Sequence, num_tokens: int) -> None:
        """Allocate the region. Raises OutOfBlocks, without changing anything."""
        if sequence not in self._regions:
            wanted = self._wanted_blocks(sequence)
            region = self._regions[sequence] = self.regions.take(wanted)
            sequence.block_table.extend(region[:wanted])
        if num_tokens > len(sequence.block_table) * self.block_size:
            raise AssertionError(f"{sequence.request_id}: {num_tokens} tokens are more than its region holds")
        sequence.num_exclusive_tokens = len(sequence.block_table) * self.block_size

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Raise AssertionError: regions cannot be shared."""
        raise AssertionError(f"{parent.request_id}: a contiguous region cannot be shared")

    def release(self, sequence: Sequence) -> None:
        region = self._regions.pop(sequence, None)
        if region is not None:
            self.regions.give_back(region)
        del sequence.block_table[:]
        sequence.num_computed_tokens = sequence.num_exclusive_tokens = 0

    def holding(self, sequence: Sequence, num_computed: int) -> Holding:
        if self._grows:
            return Holding(num_computed, num_computed)
        return Holding(self._wanted_slots(sequence), len(self._regions[sequence]) * self.block_size)

    def num_slots(self, sequences: Iterable[Sequence]) -> tuple[int, int]:
        """Return these sequences' (held, filled) slots."""
        sequences = list(sequences)
        held = sum(self.holding(sequence, sequence.num_computed_tokens).taken for sequence in sequences)
        return held, sum(sequence.num_computed_tokens for sequence in sequences)

    def check_invariants(self, sequences: Iterable[Sequence]) -> None:
        """Check that exactly these sequences have regions, which contain their block tables."""
        self.regions.check_invariants()
        sequences = set(sequences)
        if sequences != set(self._regions):
            raise AssertionError("running sequences and region owners differ")
        for sequence, region in self._regions.items():
            if list(sequence.block_table) != list(region[: len(sequence.block_table)]):
                raise AssertionError(f"{sequence.request_id}: its blocks are not its region's")
            if sequence.num_computed_tokens > len(region) * self.block_size:
                raise AssertionError(f"{sequence.request_id}: computed tokens without a block")

    def _wanted_blocks(self, sequence: Sequence) -> int:
        return -(-self._wanted_slots(sequence) // self.block_size)


class PagedKV(KVManager):
    def holding(self, sequence: Sequence, num_computed: int) -> Holding:
        """Like `ContiguousKV.holding`."""
        held = len(sequence.block_table) * self.block_size
        return Holding(held, held)


ComparedKV = ContiguousKV | PagedKV


@dataclass(frozen=True, kw_only=True)
class Pool:
    num_blocks: int
    block_size: int
    max_model_len: int

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def num_longest(self) -> int:
        """Number of maximum-length sequences that fit, in whole blocks."""
        return self.num_blocks // -(-self.max_model_len // self.block_size)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A KV policy with its batching.

    `max_batch` None: continuous batching; else batches of that size, padded to the longest prompt and output, and done
    when all are.
    """

    name: str
    make_kv: Callable[[Pool], ComparedKV]
    max_batch: Callable[[Pool], int] | None = None


def power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _whole_life(sequence: Sequence) -> int:
    return sequence.max_num_tokens - 1  # the last token is never cached


def _output_rounded_up(sequence: Sequence, max_model_len: int) -> int:
    return min(sequence.num_prompt_tokens + power_of_two(sequence.sampling.max_tokens), max_model_len)


def _contiguous(
    allocator: str, wanted: Callable[[Sequence, int], int], *, grows: bool = False
) -> Callable[[Pool], ContiguousKV]:
    def make_kv(pool: Pool) -> ContiguousKV:
        regions = ALLOCATORS[allocator](pool.num_blocks)
        return ContiguousKV(
            pool.block_size, regions, lambda sequence: wanted(sequence, pool.max_model_len), grows=grows
        )

    return make_kv


def _small_batch(pool: Pool) -> int:
    return power_of_two(pool.num_longest + 1) // 2


TEXTS = {
    "paged": "blocks as a sequence needs them",
    "oracle": "a region of just what it will fill",
    "reserve-pow2": "a region for the prompt and the answer's length rounded up to a power of two",
    "reserve-max": "a region of the longest sequence there may be",
    "static-ft": "regions of the longest sequence, as many as fit run as one padded batch (like FasterTransformer)",
    "static-hf": "a cache that grows with its padded batch of the largest power of two that surely fits (like Hugging "
    "Face's generate)",
}

WANTED: dict[str, Callable[[Sequence, int], int]] = {
    "oracle": lambda sequence, _: _whole_life(sequence),
    "reserve-pow2": _output_rounded_up,
    "reserve-max": lambda _, max_model_len: max_model_len,
}


def _policies() -> dict[str, Policy]:
    policies = [Policy(name="paged", make_kv=lambda pool: PagedKV(pool.num_blocks, pool.block_size))]
    for name, wanted in WANTED.items():
        for allocator in ALLOCATORS:
            policies.append(Policy(name=f"{name}:{allocator}", make_kv=_contiguous(allocator, wanted)))
    longest = WANTED["reserve-max"]
    policies += [
        Policy(name="static-ft", make_kv=_contiguous("best-fit", longest), max_batch=lambda pool: pool.num_longest),
        Policy(name="static-hf", make_kv=_contiguous("best-fit", longest, grows=True), max_batch=_small_batch),
    ]
    return {policy.name: policy for policy in policies}


POLICIES = _policies()

PAPERS_ALLOCATOR = "buddy"
"""The paper's allocator for all three Orca variants, although best fit favours them."""

DEFAULT_POLICIES = ",".join(
    ["paged", *WANTED, "static-ft", "static-hf", *(f"{name}:best-fit" for name in WANTED)],
)


def read_policies(text: str) -> list[Policy]:
    """Parse "paged,oracle:buddy". Raises StartupError for a repeated or unknown name."""
    chosen: dict[str, Policy] = {}
    for name in (part.strip() for part in text.split(",")):
        full_name = f"{name}:{PAPERS_ALLOCATOR}" if name in WANTED else name
        if full_name not in POLICIES:
            raise StartupError(f"--policies: {name!r} is not supported ({', '.join(TEXTS)})")
        chosen[full_name] = POLICIES[full_name]
    return list(chosen.values())


def check_room(policies: Iterable[Policy], pool: Pool) -> None:
    """Raises StartupError if a maximum-length sequence can never run."""
    if pool.num_longest < 1:
        raise StartupError(f"memory: {pool.num_slots} slots hold no sequence of {pool.max_model_len} tokens")
    num_blocks = -(-pool.max_model_len // pool.block_size)
    for policy in policies:
        kv = policy.make_kv(pool)
        if isinstance(kv, ContiguousKV) and not kv.regions.fits(num_blocks):
            raise StartupError(f"memory: {policy.name} finds no region for {pool.max_model_len} tokens in this pool")
