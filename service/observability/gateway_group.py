"""Groups of gateway processes that share a port."""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

VARIABLE = "QUIRE_GATEWAY_GROUP"
"""Set by the gateways' parent: `<index>/<size>/<folder>`."""

NUM_SLOTS = 1 << 16


@dataclass(frozen=True)
class GatewayGroup:
    """Gateway `index` of `size`; `folder` contains the files they share."""

    folder: Path
    index: int
    size: int

    @classmethod
    def find(cls, environ: Mapping[str, str]) -> GatewayGroup | None:
        """Return this process's group; None for the only gateway on its port."""
        if VARIABLE not in environ:
            return None
        index, size, folder = environ[VARIABLE].split("/", 2)
        return cls(Path(folder), int(index), int(size))

    def to_variable(self) -> str:
        return f"{self.index}/{self.size}/{self.folder}"

    def paths(self, name: str) -> Iterator[Path]:
        """Yield each gateway's file with this name."""
        for index in range(self.size):
            yield self.folder / f"{name}.{index}"


class SharedNumbers:
    """Float64 numbers in one file per gateway, continued by its successor. Not thread-safe."""

    def __init__(self, name: str, num: int, group: GatewayGroup | None) -> None:
        self._all: list[memoryview[float]] = (
            [memoryview(bytearray(8 * num)).cast("d")]
            if group is None
            else [_mapped(path, num) for path in group.paths(name)]
        )
        self.own = self._all[0 if group is None else group.index]

    def totals(self) -> list[float]:
        """Return the sums over all gateways."""
        return [sum(numbers) for numbers in zip(*self._all, strict=True)]

    def total(self, place: int) -> float:
        return sum(numbers[place] for numbers in self._all)


class OpenCounts:
    """Open requests by client. Two names collide with probability 1/65,536."""

    FILE = "open_requests"

    def __init__(self, group: GatewayGroup | None) -> None:
        self._own: Counter[str] = Counter()
        self._shared = None if group is None else SharedNumbers(self.FILE, NUM_SLOTS, group)
        if group is not None:
            forget_open_requests(group)  # a predecessor's requests ended with it

    def count(self, name: str) -> int:
        """Return the client's number of open requests over all gateways."""
        return self._own[name] if self._shared is None else int(self._shared.total(_slot(name)))

    def add(self, name: str, change: int) -> None:
        self._own[name] += change
        if not self._own[name]:
            del self._own[name]
        if self._shared is not None:
            self._shared.own[_slot(name)] += change


def forget_open_requests(group: GatewayGroup) -> None:
    """Reset the dead gateway's open requests, in place because others map the file."""
    path = list(group.paths(OpenCounts.FILE))[group.index]
    if path.exists():
        with path.open("r+b") as file:
            file.write(bytes(8 * NUM_SLOTS))


def _slot(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest()) % NUM_SLOTS


def _mapped(path: Path, num: int) -> memoryview[float]:
    with path.open("a+b") as file:
        if path.stat().st_size < 8 * num:
            file.truncate(8 * num)
        return memoryview(mmap.mmap(file.fileno(), 8 * num)).cast("d")
