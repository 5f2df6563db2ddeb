"""The comparison itself: every policy with all requests at once, then at rates around what it could keep up with."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from service.bench.flag_values import positive_number
from service.bench.kv_policies.policies import Policy
from service.bench.kv_policies.replay import ReplayFigures
from service.bench.kv_policies.runs import Run, Runs
from service.errors import StartupError

RATE_SHARES = (0.3, 0.6, 0.8, 0.9, 1.0, 1.1, 1.25)
"""Of the rate that a policy keeps up with when it is loaded: where its latency bends."""

LATENCY_FACTOR = 5.0
"""What counts as the same latency where no limit is given: so many times that of the first policy, hardly loaded."""

PLAINLY_OVER = 2.0
"""So many times a limit that is given a run need not be waited for."""


@dataclass(frozen=True, kw_only=True)
class PolicyFigures:
    """One policy. Rates are in requests a second, latencies normalised: seconds a token of the answer."""

    policy: str
    loaded: ReplayFigures | None  # None: it had no run with all requests at once
    loaded_rate: float | None
    curve: list[ReplayFigures]  # by rate
    rate_at_limit: float | None  # None: over the limit at every rate that was tried
    is_limit_reached: bool  # False: the rate is the highest that was tried
    running_ratio: float | None  # the first policy's over this one's: sequences at once,
    loaded_ratio: float | None  # requests a second when loaded,
    limit_ratio: float | None  # requests a second at the limit; None where this one's is not known


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All policies, the one that the others are held against first."""

    latency_limit_s: float
    policies: list[PolicyFigures]


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Which runs a comparison is made of."""

    rates_of: Callable[[str, float | None], Sequence[float]]
    """Of a policy, by its name, from the rate that it keeps up with when it is loaded, where it was."""
    latency_limit_s: float | None = None
    seconds: float = math.inf  # of arrivals, at each rate
    is_loaded: bool = True  # whether each policy has all requests at once too


def compare(
    replay: Callable[[Runs], list[ReplayFigures]], policies: Sequence[Policy], mean_output: float, sweep: Sweep
) -> Comparison:
    """`replay` carries runs out, in order. Without a limit there is a usual one."""
    nothing: list[None] = [None] * len(policies)
    loaded = replay([Run(policy=policy) for policy in policies]) if sweep.is_loaded else nothing
    loaded_rates = [figures and figures.loaded_tokens_per_s / mean_output for figures in loaded]
    limit_s = sweep.latency_limit_s
    give_up_s = math.inf if limit_s is None else PLAINLY_OVER * limit_s
    runs = replay(
        [
            Run(policy=policy, rate=rate, seconds=sweep.seconds, give_up_s=give_up_s)
            for policy, loaded_rate in zip(policies, loaded_rates, strict=True)
            for rate in sweep.rates_of(policy.name, loaded_rate)
        ]
    )
    curves = [[run for run in runs if run.policy == policy.name] for policy in policies]
    if limit_s is None:
        limit_s = LATENCY_FACTOR * min(run.normalized_latency_s for run in curves[0] or loaded[:1])
    limits = [rate_at(curve, limit_s) for curve in curves]
    is_reached = [any(run.normalized_latency_s > limit_s for run in curve) for curve in curves]
    figures = [
        PolicyFigures(
            policy=policy.name,
            loaded=loaded[i],
            loaded_rate=loaded_rates[i],
            curve=curves[i],
            rate_at_limit=limits[i],
            is_limit_reached=is_reached[i],
            running_ratio=loaded[i] and _ratio(loaded[0].mean_running, loaded[i].mean_running),
            loaded_ratio=loaded[i] and loaded_rates[0] / loaded_rates[i],
            limit_ratio=limits[0] / limits[i] if limits[0] and limits[i] and (is_reached[i] or i == 0) else None,
        )
        for i, policy in enumerate(policies)
    ]
    return Comparison(latency_limit_s=limit_s, policies=figures)


def _ratio(ours: float, theirs: float) -> float | None:
    """None where nothing was running when somebody looked: all was done within one step."""
    return ours / theirs if theirs else None


def rate_at(curve: Sequence[ReplayFigures], latency_limit_s: float) -> float | None:
    """The rate at which this curve crosses the limit, on a straight line between rates and logarithms of latencies; its
    last rate where it never does; None where it begins above. That of a run which was given up counts as it was by
    then, so that such a policy's rate is rather too high."""
    if not curve or curve[0].normalized_latency_s > latency_limit_s:
        return None
    for below, above in pairwise(curve):
        if above.normalized_latency_s > latency_limit_s:
            low, high, limit = (
                math.log(each) for each in (below.normalized_latency_s, above.normalized_latency_s, latency_limit_s)
            )
            return below.rate + (above.rate - below.rate) * (limit - low) / (high - low)
    return curve[-1].rate


def read_rates(text: str | None, policies: Collection[str]) -> Callable[[str, float | None], list[float]]:
    """`Sweep.rates_of` from "20,1.25x;oracle=9,10": what has no name before it is for the policies that are not named.

    Raises StartupError for what is no rate, or names none of `policies`.
    """
    if text is None:
        return lambda policy, loaded_rate: [share * loaded_rate for share in RATE_SHARES]
    if text.strip() == "0":
        return lambda policy, loaded_rate: []
    rates: dict[str, list[tuple[float, bool]]] = {}
    for part in text.split(";"):
        name, _, values = part.rpartition("=")
        found = {policy for policy in policies if name.strip() in ("", policy, policy.partition(":")[0])}
        if not found:
            raise StartupError(f"--rates: {name.strip()!r} is no policy of this comparison")
        parsed = [_rate(value.strip()) for value in values.split(",")]
        rates |= {policy: parsed for policy in found if name or policy not in rates}
    return lambda policy, loaded_rate: sorted(
        rate * loaded_rate if is_share else rate for rate, is_share in rates.get(policy, ())
    )


def _rate(text: str) -> tuple[float, bool]:
    """(number, whether it is so many times what the policy keeps up with)."""
    is_share = text.endswith("x") and text != "x"
    return positive_number("--rates", text.removesuffix("x") if is_share else text), is_share
