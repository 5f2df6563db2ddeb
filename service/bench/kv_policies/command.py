"""`quire bench memory`: the PagedAttention paper's comparison, on this engine and its kernels."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from service.bench.flag_values import positive_number, whole_number
from service.bench.kv_policies.policies import DEFAULT_POLICIES, TEXTS, check_room, read_policies
from service.bench.kv_policies.replay import fit_lengths
from service.bench.kv_policies.runs import (
    PAPER_MAX_LEN,
    Comparison,
    PolicyFigures,
    Sweep,
    compare,
    read_rates,
    real_ground,
    simulated_ground,
)
from service.bench.kv_policies.sharing import METHODS, WIDTHS, SharingFigures
from service.bench.kv_policies.simulation import MACHINES
from service.bench.report import Figure, write_report
from service.bench.trace import TracedRequest, read_trace, scaled
from service.cli.table import print_grid, shown
from service.config.settings import Settings
from service.errors import StartupError

SIMULATED_REQUESTS = 300
"""Default number of requests in a simulation."""

SHARES = ("tokens", "reserved", "internal", "external", "free")

HEADROOM = 3.0
"""Range of the drawing's latency axis, in latency limits."""


def add_memory_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, metavar="FILE", required=True, help="lengths and arrivals of requests")
    parser.add_argument(
        "--num-requests",
        metavar="N",
        help=f"first N requests of the trace (default: all; {SIMULATED_REQUESTS} with --simulate)",
    )
    parser.add_argument(
        "--simulate",
        choices=tuple(MACHINES),
        help="simulate this machine's clock, without model or GPU (default: run the real engine)",
    )
    parser.add_argument(
        "--policies",
        metavar="P,...",
        help=f"policies, baseline first (default: {DEFAULT_POLICIES}); oracle, reserve-pow2 and reserve-max use "
        "the paper's buddy allocator unless :best-fit is appended",
    )
    parser.add_argument(
        "--sharing",
        action="store_true",
        help="instead measure the blocks that 2, 4 and 6 samples or beams save by sharing: 1 - blocks held over blocks "
        "without sharing, as in the paper",
    )
    parser.add_argument(
        "--mean-lengths",
        metavar="P,O",
        help="scale prompts and answers to means of P and O tokens (default: as traced)",
    )
    _add_rate_flags(parser)
    parser.epilog = (
        "Policies. "
        + "; ".join(f"{name}: {text}" for name, text in TEXTS.items())
        + f". Without --max-model-len the longest sequence has {PAPER_MAX_LEN} tokens; without --num-gpu-blocks the "
        "pool is the simulated machine's, and the paper's 15.7K slots on the real engine."
    )


def _add_rate_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rates",
        metavar="X,...",
        help="requests/s, or 1.25x: multiples of the policy's loaded rate; 20;oracle=9: others for a policy; 0: "
        "all at once only (default: several around 1x)",
    )
    parser.add_argument("--seconds", metavar="X", help="requests of the first X seconds at each rate (default: all)")
    parser.add_argument(
        "--only-rates", action="store_true", help="skip the runs of all requests at once; --rates are then requests/s"
    )
    parser.add_argument(
        "--latency-limit",
        metavar="X",
        help="seconds per token at which rates are compared; a run is given up at twice that (default: 5 times the "
        "first policy's least; no run is given up)",
    )


def run_memory_bench(settings: Settings, flags: argparse.Namespace) -> int:
    """Run the bench. Return 0. Raises StartupError for conflicting flags or work that does not fit."""
    _check(flags)
    policies = [] if flags.sharing else read_policies(DEFAULT_POLICIES if flags.policies is None else flags.policies)
    sweep = Sweep(
        rates_of=read_rates(flags.rates, {policy.name for policy in policies}),
        latency_limit_s=_number(flags, "--latency-limit"),
        seconds=_number(flags, "--seconds") or math.inf,
        is_loaded=not flags.only_rates,
    )
    requests = _read_requests(flags)
    ground = real_ground(settings) if flags.simulate is None else simulated_ground(settings, flags.simulate)
    check_room(policies, ground.pool)
    fitted = fit_lengths(requests, ground.pool.max_model_len)
    record = {
        "bench": "memory",
        **ground.description,
        **asdict(ground.pool),
        "trace": flags.trace.stem,
        "num_requests": len(fitted),
        "mean_prompt": fmean(request.num_prompt_tokens for request in fitted),
        "mean_output": fmean(request.num_output_tokens for request in fitted),
        "num_shortened": sum(before != after for before, after in zip(requests, fitted, strict=True)),
    }
    title = f"{flags.trace.stem}, {ground.pool.num_slots:,} slots, {ground.description['device']}"
    if flags.sharing:
        shared = ground.share(fitted, [(method, width) for method in METHODS for width in WIDTHS])
        _print_sharing(shared)
        write_report(flags, {**record, "sharing": [asdict(row) for row in shared]}, sharing_figure(shared, title))
    else:
        mean_output = fmean(request.num_output_tokens for request in fitted)
        comparison = compare(partial(ground.replay, fitted), policies, mean_output, sweep)
        _print(comparison)
        record |= {"seconds": _number(flags, "--seconds"), **asdict(comparison)}
        write_report(flags, record, comparison_figure(comparison, title))
    return 0


def _check(flags: argparse.Namespace) -> None:
    for name in ("policies", "rates", "seconds", "only_rates", "latency_limit"):
        if flags.sharing and getattr(flags, name):
            raise StartupError(f"--{name.replace('_', '-')} does not go with --sharing")
    values = [value.rpartition("=")[2].strip() for value in (flags.rates or "0").replace(";", ",").split(",")]
    if flags.only_rates and (values == ["0"] or any(value.endswith("x") for value in values)):
        raise StartupError("--only-rates: give --rates in requests a second")


def _number(flags: argparse.Namespace, flag: str) -> float | None:
    text = getattr(flags, flag[2:].replace("-", "_"))
    return None if text is None else positive_number(flag, text)


def _read_requests(flags: argparse.Namespace) -> list[TracedRequest]:
    requests = read_trace(flags.trace)
    if flags.num_requests is not None:
        requests = requests[: whole_number("--num-requests", flags.num_requests)]
    elif flags.simulate is not None:
        requests = requests[:SIMULATED_REQUESTS]
    if flags.mean_lengths is None:
        return requests
    means = [positive_number("--mean-lengths", part) for part in flags.mean_lengths.split(",")]
    if len(means) != 2:
        raise StartupError(f"--mean-lengths: {flags.mean_lengths!r} is not of the form 19.3,58.5")
    return scaled(requests, *means)


def _print(comparison: Comparison) -> None:
    first = comparison.policies[0].policy
    if comparison.policies[0].loaded is not None:
        print("\nAll requests at once, while they wait for memory; shares in % of the pool; x: times over by " + first)
        shares = ("tokens", "reserved", "internal", "external", "held empty")
        header = ("policy", "running", "peak", *shares, "requests/s", "tokens/s", "x running", "x requests/s")
        print_grid(header, [_loaded_cells(row) for row in comparison.policies])
        print("buddy: the paper's allocator for all three Orcas; best-fit: the best hole, kinder than any server was")
    runs = [run for row in comparison.policies for run in row.curve]
    if not runs:
        return
    limit = f"{comparison.latency_limit_s:.3g} s/token"
    print(f"\nNormalised latency, s/token, at requests/s; +: at least, for it was given up. Which rate keeps {limit}")
    print(f"(+: or more); x: times over by {first}")
    columns = [f"rate {number}" for number in range(1, max(len(row.curve) for row in comparison.policies) + 1)]
    rows = [_latency_cells(row, len(columns), comparison.policies[0]) for row in comparison.policies]
    print_grid(("policy", *columns, f"at {limit}", "x"), rows)


def _loaded_cells(row: PolicyFigures) -> list[str]:
    loaded = row.loaded
    assert loaded is not None
    use = loaded.use
    shares = (use.tokens, use.reserved, use.internal, use.external, use.held_waste)
    counts = (loaded.mean_running, loaded.peak_running)
    rates = (row.loaded_rate, loaded.loaded_tokens_per_s)
    ratios = (row.running_ratio, row.loaded_ratio)
    return [
        row.policy,
        *map(shown, counts),
        *(f"{100 * share:.1f}" for share in shares),
        *map(shown, rates),
        *map(_ratio_cell, ratios),
    ]


def _latency_cells(row: PolicyFigures, num_columns: int, first: PolicyFigures) -> list[str]:
    cells = [f"{run.rate:.3g}: {run.normalized_latency_s:.4f}{'+' * run.is_given_up}" for run in row.curve]
    cells += ["-"] * (num_columns - len(cells))
    rate = shown(row.rate_at_limit) + ("" if row.is_limit_reached else "+")
    is_more = row is not first and row.limit_ratio is not None and not first.is_limit_reached
    return [row.policy, *cells, rate, _ratio_cell(row.limit_ratio) + "+" * is_more]


def _ratio_cell(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def _print_sharing(rows: Sequence[SharingFigures]) -> None:
    print("\nAll requests at once. Blocks: means over the steps; saved: % of what branches would hold each for itself")
    header = ("method", "branches", "running", "blocks alone", "blocks held", "saved", "copies", "preemptions")
    cells = []
    for row in rows:
        means = (row.running, row.logical_blocks, row.used_blocks, 100 * row.saved)
        counts = (row.num_copies, row.num_preemptions)
        cells.append([row.method, shown(row.width), *map(shown, means), *map(shown, counts)])
    print_grid(header, cells)


def comparison_figure(comparison: Comparison, title: str) -> Figure:
    """Draw cache use, and latency against rate, as in the paper."""
    loaded = {row.policy: row.loaded.use for row in comparison.policies if row.loaded is not None}
    bars = [
        {"label": share, "x": list(loaded), "y": [100 * getattr(use, share) for use in loaded.values()]}
        for share in SHARES
        if any(getattr(use, share) for use in loaded.values())
    ]
    panels: list[dict[str, Any]] = []
    if bars:
        panels.append({"kind": "stack", "title": "KV cache, loaded", "x": "% of the pool", "y": "", "series": bars})
    curves = [
        {
            "label": row.policy,
            "x": [run.rate for run in row.curve],
            "y": [run.normalized_latency_s for run in row.curve],
        }
        for row in comparison.policies
        if row.curve
    ]
    if curves:
        axes: dict[str, Any] = {"x": "requests/s", "y": "s/token", "y_max": HEADROOM * comparison.latency_limit_s}
        panels.append({"kind": "line", "title": "normalised latency", **axes, "series": curves})
    return {"title": title, "panels": panels}


def sharing_figure(rows: Sequence[SharingFigures], title: str) -> Figure:
    """Return a figure with a bar per method and width."""
    bars = {
        "label": "saved",
        "x": [f"{row.method}, {row.width}" for row in rows],
        "y": [100 * row.saved for row in rows],
    }
    panel = {"kind": "bars", "title": "saved by sharing blocks", "x": "% of the blocks", "y": "", "series": [bars]}
    return {"title": title, "panels": [panel]}
