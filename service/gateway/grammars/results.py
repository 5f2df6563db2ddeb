"""Cache of compilation results, bounded in bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

MAX_BYTES = 16 << 20
ENTRY_BYTES = 512
"""Overhead of an entry besides its text."""
TRANSIENT_TTL_S = 120.0
"""Lifetime of results that may differ on an idle machine: out of time or memory."""


@dataclass(frozen=True)
class Result:
    text: str | None  # the compiled grammar
    error: str = ""  # set if `text` is None
    is_final: bool = True  # a retry would give the same result
    ending: str = ""  # how the process ended, if it did: one of `service.observability.metrics.GRAMMAR_RESULTS`

    @property
    def kind(self) -> str:
        """Label of the result, one of GRAMMAR_RESULTS."""
        return self.ending or ("refused" if self.text is None else "compiled")


class ResultCache:
    """LRU cache of results."""

    def __init__(self, clock: Callable[[], float], max_bytes: int = MAX_BYTES) -> None:
        self._clock = clock
        self._max_bytes = max_bytes
        self._by_key: OrderedDict[bytes, tuple[float, int, Result]] = OrderedDict()
        self._num_bytes = 0

    def get(self, key: bytes) -> Result | None:
        found = self._by_key.get(key)
        if found is None:
            return None
        at_s, num_bytes, result = found
        if not result.is_final and self._clock() - at_s > TRANSIENT_TTL_S:
            del self._by_key[key]
            self._num_bytes -= num_bytes
            return None
        self._by_key.move_to_end(key)
        return result

    def put(self, key: bytes, result: Result) -> None:
        _, before, _ = self._by_key.pop(key, (0.0, 0, None))
        num_bytes = ENTRY_BYTES + len(result.error) + 4 * len(result.text or "")
        self._by_key[key] = (self._clock(), num_bytes, result)
        self._num_bytes += num_bytes - before
        while self._num_bytes > self._max_bytes:
            _, (_, dropped, _) = self._by_key.popitem(last=False)
            self._num_bytes -= dropped
