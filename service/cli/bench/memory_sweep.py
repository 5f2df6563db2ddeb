"""The comparison itself: every policy with all requests at once, then at rates around what it could keep up with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from service.cli.bench.memory_policies import Policy
from service.cli.bench.memory_replay import ReplayFigures
from service.cli.bench.memory_runs import Runs

RATE_SHARES = (0.3, 0.6, 0.8, 0.9, 1.0, 1.1, 1.25)
"""Of the rate that a policy keeps up with when it is loaded: where its latency bends."""

LATENCY_FACTOR = 5.0
"""What counts as the same latency where no limit is given: so many times that of the first policy, hardly loaded."""


@dataclass(frozen=True, kw_only=True)
class PolicyFigures:
    """One policy. Rates are in requests a second, latencies normalised: seconds a token of the answer."""

    policy: str
    loaded: ReplayFigures
    loaded_rate: float
    curve: list[ReplayFigures]  # by rate
    rate_at_limit: float | None  # None: over the limit at every rate that was tried
    is_limit_reached: bool  # False: the rate is the highest that was tried
    running_ratio: float  # the first policy's over this one's: sequences at once,
    loaded_ratio: float  # requests a second when loaded,
    limit_ratio: float | None  # requests a second at the limit; None where this one's is not known


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All policies, the one that the others are held against first."""

    latency_limit_s: float
    policies: list[PolicyFigures]


def compare(
    replay: Callable[[Runs], list[ReplayFigures]],
    policies: Sequence[Policy],
    mean_output: float,
    rates_of: Callable[[float], Sequence[float]],
    latency_limit_s: float | None,
) -> Comparison:
    """`replay` carries runs out, in order. `rates_of` gives a policy's rates from the one that it keeps up with
    when it is loaded; without a limit there is a usual one."""
    loaded = replay([(policy, None) for policy in policies])
    loaded_rates = [figures.loaded_tokens_per_s / mean_output for figures in loaded]
    plan = [
        (policy, rate)
        for policy, loaded_rate in zip(policies, loaded_rates, strict=True)
        for rate in rates_of(loaded_rate)
    ]
    runs = replay(plan)
    curves = [[run for run in runs if run.policy == policy.name] for policy in policies]
    if latency_limit_s is None:
        latency_limit_s = LATENCY_FACTOR * min(run.normalized_latency_s for run in curves[0] or loaded[:1])
    limits = [rate_at(curve, latency_limit_s) for curve in curves]
    is_reached = [any(run.normalized_latency_s > latency_limit_s for run in curve) for curve in curves]
    figures = [
        PolicyFigures(
            policy=policy.name,
            loaded=loaded[i],
            loaded_rate=loaded_rates[i],
            curve=curves[i],
            rate_at_limit=limits[i],
            is_limit_reached=is_reached[i],
            running_ratio=loaded[0].mean_running / loaded[i].mean_running,
            loaded_ratio=loaded_rates[0] / loaded_rates[i],
            limit_ratio=limits[0] / limits[i] if limits[0] and limits[i] and (is_reached[i] or i == 0) else None,
        )
        for i, policy in enumerate(policies)
    ]
    return Comparison(latency_limit_s=latency_limit_s, policies=figures)


def rate_at(curve: Sequence[ReplayFigures], latency_limit_s: float) -> float | None:
    """The rate at which this curve crosses the limit, on a straight line between rates and logarithms of latencies; its
    last rate where it never does; None where it begins above."""
    if not curve or curve[0].normalized_latency_s > latency_limit_s:
        return None
    for below, above in pairwise(curve):
        if above.normalized_latency_s > latency_limit_s:
            low, high, limit = (
                math.log(each) for each in (below.normalized_latency_s, above.normalized_latency_s, latency_limit_s)
            )
            return below.rate + (above.rate - below.rate) * (limit - low) / (high - low)
    return curve[-1].rate
