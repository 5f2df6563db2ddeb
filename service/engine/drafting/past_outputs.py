"""Recent outputs of a tenant, searched for a sequence's last tokens."""

from __future__ import annotations

from array import array
from collections import deque
from itertools import islice, zip_longest

KEY_TOKENS = 3
"""Tokens that must match."""
MAX_CANDIDATES = 12
"""Latest occurrences to compare."""
MAX_VOTERS = 3
"""Latest of the longest matches, whose next tokens are compared."""
TOKEN_BYTES = array("I").itemsize
KEY_BYTES = KEY_TOKENS * TOKEN_BYTES
NO_TOKEN = (1 << 8 * TOKEN_BYTES) - 1
"""Terminates each output; no vocabulary contains it."""
NOWHERE = -1


class PastOutputs:
    """Outputs in one buffer, with a chain of occurrences per run of KEY_TOKENS, latest first. An occurrence is the
    number of bytes ever added before the token that follows it."""

    def __init__(self) -> None:
        self._tokens = bytearray()
        self._previous = array("q")  # the run's previous occurrence, by following token
        self._num_cut = 0  # bytes
        self._first = 0  # offset of the oldest output
        self._ends: deque[int] = deque()
        self._latest: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, output: array[int]) -> None:
        tokens, latest = output.tobytes(), self._latest
        start = self._num_cut + len(self._tokens)
        previous = array("q", [NOWHERE]) * (len(output) + 1)
        for index in range(KEY_TOKENS, len(output)):
            end = index * TOKEN_BYTES
            key = tokens[end - KEY_BYTES : end]
            previous[index] = latest.get(key, NOWHERE)
            latest[key] = start + end
        self._previous += previous
        self._tokens += tokens
        self._tokens += NO_TOKEN.to_bytes(TOKEN_BYTES)
        self._ends.append(self._num_cut + len(self._tokens))

    def drop_oldest(self) -> None:
        end = self._ends.popleft()
        tokens = bytes(self._tokens[self._first - self._num_cut : end - self._num_cut])
        for offset in range(KEY_BYTES, len(tokens) - TOKEN_BYTES, TOKEN_BYTES):
            key = tokens[offset - KEY_BYTES : offset]
            if self._latest.get(key) == self._first + offset:
                del self._latest[key]
        self._first = end
        num_old = end - self._num_cut
        if 2 * num_old >= len(self._tokens):
            del self._tokens[:num_old]
            del self._previous[: num_old // TOKEN_BYTES]
            self._num_cut = end

    def longest_matches(self, recent: bytes, shortest: int) -> tuple[int, list[int]]:
        """Return the largest number of last tokens of `recent` that occur, at least `shortest`, and where, latest
        first."""
        buffer, previous, num_cut, first = self._tokens, self._previous, self._num_cut, self._first
        matching = longer = recent[-max(KEY_BYTES, shortest * TOKEN_BYTES) :]
        at, ends = self._latest.get(recent[-KEY_BYTES:], NOWHERE), list[int]()
        for _ in range(MAX_CANDIDATES):
            if at < first:
                break
            end = at - num_cut
            if buffer.endswith(matching, 0, end):
                if longer and buffer.endswith(longer, 0, end):
                    matched = TOKEN_BYTES * num_matching(recent, buffer[max(0, end - len(recent)) : end])
                    longer = recent[-matched - TOKEN_BYTES :] if matched < len(recent) else b""
                    matching, ends = recent[-matched:], []
                ends.append(at)
                if not longer and len(ends) == MAX_VOTERS:
                    break
            at = previous[end // TOKEN_BYTES]
        return len(matching) // TOKEN_BYTES, ends[:MAX_VOTERS]

    def continuation(self, ends: list[int], count: int, min_prob: float) -> tuple[int, ...]:
        """Return up to `count` likeliest tokens after `ends`, while at least the share `min_prob` of them agree."""
        starts, size = [end - self._num_cut for end in ends], count * TOKEN_BYTES
        paths = [self._tokens[start : start + size] for start in starts]
        if 2 * paths.count(paths[0]) > len(paths) and min_prob <= 0.5:
            del paths[1:]
        drafts = likeliest([memoryview(path).cast("I").tolist() for path in paths], min_prob * len(paths))
        return tuple(drafts[: drafts.index(NO_TOKEN)] if NO_TOKEN in drafts else drafts)


def likeliest(paths: list[list[int]], min_votes: float) -> list[int]:
    """Follow the most frequent token (on a tie, the first path's) while `min_votes` paths have it. NO_TOKEN gets no
    votes."""
    drafts: list[int] = []
    while len(paths) > 1:
        for column in islice(zip_longest(*paths, fillvalue=NO_TOKEN), len(drafts), None):
            token, num_votes = column[0], column.count(column[0])
            if num_votes < len(column):
                break
            drafts.append(token)
        else:
            return drafts
        if token == NO_TOKEN or 2 * num_votes < len(column):
            token = max(filter(NO_TOKEN.__ne__, column), key=column.count)
            num_votes = column.count(token)
        if num_votes < min_votes:
            return drafts
        paths = [path for path, own in zip(paths, column, strict=True) if own == token]
    return paths[0]


def num_matching(one: bytes | bytearray, other: bytes | bytearray) -> int:
    """Return how many trailing tokens are equal."""
    if one == other:
        return len(one) // TOKEN_BYTES
    count = min(len(one), len(other))
    differing = int.from_bytes(one[-count:], "big") ^ int.from_bytes(other[-count:], "big")
    lowest_bit = (differing & -differing).bit_length() - 1
    return lowest_bit // (8 * TOKEN_BYTES) if differing else count // TOKEN_BYTES
