"""Random grammars of every kind are compiled or refused in bounded time."""

from __future__ import annotations

from collections import Counter

from service.gateway.grammars.pool import CompileLimits
from tests.support.grammar_fuzzer import verdicts

NUM_GRAMMARS = 500
LIMITS = CompileLimits(max_cpu_s=1.0, max_wait_s=60.0)
SLOWEST_S = LIMITS.max_wall_s + 10.0


async def test_no_grammar_takes_long_or_crashes_its_process():
    counts: Counter[str] = Counter()
    async for verdict in verdicts(range(NUM_GRAMMARS), LIMITS):
        assert verdict.kind != "crashed", verdict
        assert verdict.elapsed_s < SLOWEST_S, verdict
        assert verdict.error.isprintable(), verdict
        assert len(verdict.error) < 400, verdict
        counts[verdict.kind] += 1
    assert counts["compiled"] > NUM_GRAMMARS // 5, counts
    assert counts["refused"] > NUM_GRAMMARS // 5, counts
