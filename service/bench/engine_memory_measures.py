"""What `quire bench engine` measures of memory: users whose prompts begin alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from model.sampling_params import SamplingParams
from service.engine.build import BuiltEngine
from service.engine.request import EngineRequest
from service.errors import StartupError

NUM_LATER = 8
"""Users of one prefix who come one after the other."""


@dataclass(frozen=True, kw_only=True)
class PrefixFigures:
    """Users whose prompts begin alike: all at once on an empty cache, and others one after the other."""

    num_users: int
    prefix_tokens: int
    own_tokens: int  # of each user's prompt, behind the prefix
    output_tokens: int  # of each
    total_s: float  # all at once
    computed_prompt_tokens: int  # of all of them together
    most_blocks_used: int
    first_ttft_ms: float  # of a user alone whose prefix nobody has had
    later_ttft_ms: float  # of one alone whose prefix others have had, the median
    ttft_ratio: float
    strangers_ttft_ms: float  # of as many users at once, each with a prefix of its own, the mean
    together_ttft_ms: float  # of as many at once whose prefix others have had, the mean
    together_ttft_ratio: float


def measure_prefix(
    built: BuiltEngine, num_users: int, prefix_tokens: int, own_tokens: int, output_tokens: int
) -> PrefixFigures:
    """Raises StartupError where the engine does not hold them."""
    _expect_room(built, num_users, prefix_tokens, own_tokens, output_tokens)
    random, vocab = np.random.default_rng(0), built.config.vocab_size

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(random.integers(0, vocab, count).tolist())

    _run(built, [tokens(prefix_tokens + own_tokens)], 2)  # warms up
    prefix = tokens(prefix_tokens)
    before = built.engine.stats()
    total_s, _, most_blocks = _run(built, [prefix + tokens(own_tokens) for _ in range(num_users)], output_tokens)
    after = built.engine.stats()
    num_prompt = num_users * (prefix_tokens + own_tokens)
    together_s = _run(built, [prefix + tokens(own_tokens) for _ in range(num_users)], 2)[1]
    strangers_s = _run(built, [tokens(prefix_tokens + own_tokens) for _ in range(num_users)], 2)[1]
    prefix = tokens(prefix_tokens)
    first_s, *later_s = (_run(built, [prefix + tokens(own_tokens)], 2)[1] for _ in range(1 + NUM_LATER))
    return PrefixFigures(
        num_users=num_users,
        prefix_tokens=prefix_tokens,
        own_tokens=own_tokens,
        output_tokens=output_tokens,
        total_s=total_s,
        computed_prompt_tokens=num_prompt - (after.num_hit_tokens - before.num_hit_tokens),
        most_blocks_used=most_blocks,
        first_ttft_ms=1e3 * first_s,
        later_ttft_ms=1e3 * statistics.median(later_s),
        ttft_ratio=first_s / statistics.median(later_s),
        strangers_ttft_ms=1e3 * strangers_s,
        together_ttft_ms=1e3 * together_s,
        together_ttft_ratio=strangers_s / together_s,
    )


def _run(built: BuiltEngine, prompts: Sequence[tuple[int, ...]], num_output: int) -> tuple[float, float, int]:
    """(seconds to the end, mean seconds to the first token, most blocks used)."""
    wishes = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        built.engine.add_request(EngineRequest(request_id=str(number), prompt=prompt, sampling=wishes))
    begin_s, most = time.perf_counter(), 0
    first_s: dict[str, float] = {}
    while built.engine.has_work:
        built.engine.step()
        now_s = time.perf_counter() - begin_s
        for output in built.engine.drain_request_outputs():
            first_s.setdefault(output.request_id, now_s)
        most = max(most, built.engine.pool.num_used)
    return time.perf_counter() - begin_s, statistics.fmean(first_s.values()), most


def _expect_room(built: BuiltEngine, num_users: int, prefix: int, own: int, output: int) -> None:
    if prefix + own + output > built.limits.max_model_len:
        raise StartupError(f"engine: {prefix + own + output} tokens are more than {built.limits.max_model_len}")
    size = built.memory.block_size
    needed = prefix // size + num_users * -(-(own + output + size) // size)
    if needed > built.memory.num_blocks:
        raise StartupError(f"engine: that needs {needed} blocks, and the pool has {built.memory.num_blocks}")
