"""Suffix decoding: the tenant's recent outputs, and the sequence's own tokens, go on as they did before."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Sequence as Seq

from service.engine.drafting.drafter import SUFFIX
from service.engine.drafting.ngram import TokenIndex, repeated
from service.engine.sequence import Sequence

KEY_TOKENS = 3
"""Tokens that must match."""
MAX_CANDIDATES = 16
"""Latest occurrences that vote."""
MAX_TOKENS = 1 << 20
"""Limit of all tenants' outputs."""


class SuffixDrafter:
    """Outputs of one tenant never draft for another: the time of an answer would show what others wrote."""

    source, writes_cache, token_s = SUFFIX, False, 0.0

    def __init__(self, *, max_depth: int, max_requests: int, max_spec_factor: float, min_token_prob: float):
        """Draft at most `max_spec_factor` tokens per matching token, of which `max_depth` count, while the most
        frequent next one has `min_token_prob`."""
        self._max_depth, self._max_requests = max_depth, max_requests
        self._max_spec_factor, self._min_token_prob = max_spec_factor, min_token_prob
        self._tenants: dict[str, _PastOutputs] = {}
        self._order: deque[tuple[str, int]] = deque()  # tenant, tokens; oldest first
        self._num_tokens = 0
        self._indexes: dict[Sequence, TokenIndex] = {}

    def draft(self, sequences: Seq[Sequence], max_tokens: Seq[int]) -> list[tuple[int, ...]]:
        return [self._draft(one, count) for one, count in zip(sequences, max_tokens, strict=True)]

    def on_end(self, sequence: Sequence) -> None:
        """Add the output to its tenant's, dropping the oldest outputs beyond the limits."""
        self._indexes.pop(sequence, None)
        output = sequence.token_ids[sequence.num_prompt_tokens :]
        if len(output) <= KEY_TOKENS or self._max_requests == 0:
            return
        self._tenants.setdefault(sequence.group.tenant, _PastOutputs()).add(output)
        self._order.append((sequence.group.tenant, len(output)))
        self._num_tokens += len(output)
        while len(self._order) > self._max_requests or (self._num_tokens > MAX_TOKENS and len(self._order) > 1):
            tenant, count = self._order.popleft()
            self._num_tokens -= count
            self._tenants[tenant].drop_oldest()
            if not self._tenants[tenant].outputs:
                del self._tenants[tenant]

    def _draft(self, sequence: Sequence, count: int) -> tuple[int, ...]:
        recent = sequence.token_ids[-self._max_depth :]
        past = self._tenants.get(sequence.group.tenant)
        depth, drafts = (0, ()) if past is None else past.continuation(recent, count, self._min_token_prob)
        index = self._indexes.get(sequence)
        if index is None:
            index = self._indexes[sequence] = TokenIndex((KEY_TOKENS,))
        start = index.find(sequence)
        if start is not None:
            own_depth = num_matching(recent, sequence.token_ids, start)
            if own_depth >= depth:
                depth, drafts = own_depth, repeated(sequence, start, count)
        return drafts[: int(depth * self._max_spec_factor)]


def num_matching(recent: array[int], tokens: array[int], end: int) -> int:
    """Return how many of the last tokens of `recent` end `tokens[:end]`."""
    longest = min(len(recent), end)
    if tokens[end - longest : end] == recent[len(recent) - longest :]:
        return longest
    count = 0
    while recent[-1 - count] == tokens[end - 1 - count]:
        count += 1
    return count


class _PastOutputs:
    """Outputs of one tenant, and where each run of KEY_TOKENS occurs in them."""

    def __init__(self) -> None:
        self.outputs: dict[int, array[int]] = {}  # by number, oldest first
        self._next = 0
        self._found: dict[tuple[int, ...], deque[tuple[int, int]]] = {}  # (output, end of the run)

    def add(self, output: array[int]) -> None:
        self.outputs[self._next] = output
        for end in range(KEY_TOKENS, len(output)):
            key = tuple(output[end - KEY_TOKENS : end])
            self._found.setdefault(key, deque(maxlen=MAX_CANDIDATES)).append((self._next, end))
        self._next += 1

    def drop_oldest(self) -> None:
        number = next(iter(self.outputs))
        output = self.outputs.pop(number)
        for end in range(KEY_TOKENS, len(output)):
            key = tuple(output[end - KEY_TOKENS : end])
            ends = self._found.get(key)
            while ends and ends[0][0] <= number:
                ends.popleft()
            if not ends:
                self._found.pop(key, None)

    def continuation(self, recent: array[int], count: int, min_prob: float) -> tuple[int, tuple[int, ...]]:
        """Return how many tokens match, and the likeliest next ones."""
        ends = self._found.get(tuple(recent[-KEY_TOKENS:]))
        if not ends:
            return 0, ()
        depths = [(num_matching(recent, self.outputs[number], end), number, end) for number, end in ends]
        longest = max(depth for depth, _, _ in depths)
        paths = [self.outputs[number][end : end + count] for depth, number, end in depths if depth == longest]
        drafts: list[int] = []
        total = len(paths)
        while len(drafts) < count:
            votes = Counter(path[len(drafts)] for path in reversed(paths) if len(path) > len(drafts))
            if not votes:
                break
            token, num_votes = votes.most_common(1)[0]
            if num_votes < min_prob * total:
                break
            paths = [path for path in paths if len(path) > len(drafts) and path[len(drafts)] == token]
            drafts.append(token)
        return longest, tuple(drafts)
