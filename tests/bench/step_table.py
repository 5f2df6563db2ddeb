"""Time that each operation adds to a step, from a profiler's kernels.

A kernel may start while the previous one runs, and then waits: it adds the time from the previous end, or its own start
if later, to its own end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from model.config import ModelConfig
from service.bench.kernels import Ceilings

PRODUCTS = ("qkv", "output", "gate_up", "down")
"""Products of a layer without experts, in launch order; the head's follow after all layers."""

EXPERT_PRODUCTS = ("qkv", "output", "router")
"""The same of a layer with experts, whose own products have kernels of their own."""

HEAD = "lm_head"
COPIES = "copies"
ATTENTION = "paged_decode"
EXPERTS = "experts_linear"


@dataclass(frozen=True, slots=True)
class KernelEvent:
    """One kernel or copy. Times in microseconds of one clock."""

    name: str
    begin_us: float
    end_us: float


@dataclass(frozen=True, kw_only=True)
class OperationRow:
    """Figures of one operation."""

    op: str
    launches: float  # per step
    time_us: float
    step_share: float
    ceiling_share: float | None  # least time of its bytes and FLOPs over its time


@dataclass(frozen=True, kw_only=True)
class StepTable:
    """Figures of one batch; means of the profiled steps."""

    batch: int
    mean_context: float
    step_us: float  # from the first kernel to the last end
    timed_us: float  # without the profiler, by the host's clock
    idle_us: float  # idle device
    host_ms: float  # scheduling, building and output, without waits for the device
    memory_share: float  # time of the step's least bytes at the copy rate, over timed_us
    experts_in_use: float | None  # of a layer, mean; None without experts
    rows: list[OperationRow]


def products_of(config: ModelConfig) -> list[str]:
    """Return the products of a step in launch order, without those of experts."""
    has_experts = (False,) * config.num_layers if config.experts is None else config.experts.layers
    return [name for experts in has_experts for name in (EXPERT_PRODUCTS if experts else PRODUCTS)] + [HEAD]


def op_names(events: Sequence[KernelEvent], products: Sequence[str]) -> list[str]:
    """Return the operation of each event of whole steps of these products, in order of start.

    A product is a kernel not of ours, or our own. Further launches of cuBLASLt (reductions, memsets) and pieces of many
    rows belong to the previous one.
    """
    names, num_products, product, previous, expert_product, is_gated = [], 0, "", "", "", False
    for event in events:
        kind = "part of a product" if event.name == previous and _kind(previous) == "product" else _kind(event.name)
        previous = event.name
        if kind == "product":
            product = products[num_products % len(products)]
            num_products += 1
        if kind == "experts_row":
            num_products += 1  # the router's product is in it
        if kind in ("group_by_expert", "route_few"):
            expert_product = "gate_up"
        elif kind.startswith("silu_mul") or is_gated:
            expert_product = "down"
        is_gated = expert_product == "gate_up" and event.name == "experts_gemv"  # unless silu_mul follows
        if kind in ("product", "part of a product"):
            names.append(f"linear {product}")
        else:
            names.append(f"experts {expert_product}" if kind == EXPERTS else kind)
    return names


def _kind(kernel: str) -> str:
    lowered = kernel.lower()
    if "memcpy" in lowered:
        return COPIES
    if kernel.startswith(("experts_gemv", "experts_sm90", "experts_w4a16")):
        return EXPERTS
    if kernel == "rope_paged_decode":
        return ATTENTION  # of few rows, rotation included
    if "splitkreduce" in lowered or "memset" in lowered:
        return "part of a product"
    if "nvjet" in lowered or "gem" in lowered or "cutlass" in lowered or kernel.startswith("small_m"):
        return "product"
    return kernel


def added_us(events: Iterable[KernelEvent]) -> tuple[list[float], float]:
    """Return the time that each event adds, and the gaps, in order of start."""
    added, idle, end = [], 0.0, None
    for event in events:
        end = event.begin_us if end is None else end
        idle += max(0.0, event.begin_us - end)
        added.append(max(0.0, event.end_us - max(end, event.begin_us)))
        end = max(end, event.end_us)
    return added, idle


def work_of(
    config: ModelConfig, batch: int, mean_context: float, item: int, experts_in_use: float | None = None
) -> dict[str, tuple[float, float]]:
    """Return least bytes and FLOPs per step by operation; `item` bytes an element; a layer reads `experts_in_use`."""
    layers, hidden, inner, experts = config.num_layers, config.hidden_size, config.intermediate_size, config.experts
    num_routed = 0 if experts is None else sum(experts.layers)
    q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes = {
        "qkv": (q_width + 2 * kv_width, hidden, layers, item),
        "output": (hidden, q_width, layers, item),
        "gate_up": (2 * inner, hidden, layers - num_routed, item),
        "down": (hidden, inner, layers - num_routed, item),
        HEAD: (config.vocab_size, hidden, 1, 4),
    }
    if experts is not None:
        shapes["router"] = (experts.num_experts, hidden, num_routed, 4)
    work = {
        f"linear {name}": (count * ((n * k + batch * k) * item + batch * n * out_item), count * 2 * batch * n * k)
        for name, (n, k, count, out_item) in shapes.items()
        if count
    }
    num_bytes = {
        ATTENTION: layers * batch * (mean_context * 2 * kv_width + 2 * q_width) * item,
        "add_rms_norm": layers * 2 * 4 * batch * hidden * item,
        "silu_mul": (layers - num_routed) * 3 * batch * inner * item,
        "rope_kv_write": layers * 2 * batch * (q_width + 2 * kv_width) * item,
        "sample_tokens": batch * config.vocab_size * 4,
    }
    if experts is not None and experts_in_use is not None:
        pairs, own = batch * experts.num_used, experts.intermediate_size
        for name, (n, k) in {"gate_up": (2 * own, hidden), "down": (hidden, own)}.items():
            moved = (experts_in_use * n * k + pairs * (n + k)) * item
            work[f"experts {name}"] = num_routed * moved, num_routed * 2 * pairs * n * k
        num_bytes["silu_mul"] += num_routed * 3 * pairs * own * item
        num_bytes["route_experts"] = num_routed * (batch * experts.num_experts * 4 + pairs * 8)
        num_bytes["group_by_expert"] = num_routed * 16 * pairs
        num_bytes["combine_experts"] = num_routed * (pairs + batch) * hidden * item
    return work | {name: (count, 0) for name, count in num_bytes.items()}


def least_us(work: Mapping[str, tuple[float, float]], ceilings: Ceilings) -> dict[str, float]:
    """Return the least time by operation at the ceilings."""
    return {
        name: 1e6 * max(num_bytes / ceilings.copy_bytes_per_s, num_flops / ceilings.gemm_flops_per_s)
        for name, (num_bytes, num_flops) in work.items()
    }


def table_of(
    events: Sequence[KernelEvent], num_steps: int, batch: int, mean_context: float, timed_us: float, host_ms: float,
    config: ModelConfig, item: int, ceilings: Ceilings, weight_bytes: Mapping[str, int] | None = None,
    experts_in_use: float | None = None,
) -> StepTable:  # fmt: skip
    """Return the table of `num_steps` whole steps; the longest operation first.

    `weight_bytes` are of all layers' quantised products ("linear qkv", "experts down": of the experts in use), whose
    FLOPs are counted as those of 16 bits.
    """
    events = sorted(events, key=lambda event: (event.begin_us, event.end_us))
    added, idle_us = added_us(events)
    times, launches = {}, {}
    for name, time_us in zip(op_names(events, products_of(config)), added, strict=True):
        times[name] = times.get(name, 0.0) + time_us / num_steps
        launches[name] = launches.get(name, 0) + 1
    work = work_of(config, batch, mean_context, item, experts_in_use)
    for name, num_bytes in (weight_bytes or {}).items():
        work[name] = (num_bytes, work[name][1])
    least = least_us(work, ceilings)
    step_us = sum(times.values()) + idle_us / num_steps
    rows = [
        OperationRow(
            op=name,
            launches=launches[name] / num_steps,
            time_us=time_us,
            step_share=time_us / step_us,
            ceiling_share=least[name] / time_us if name in least and time_us else None,
        )
        for name, time_us in sorted(times.items(), key=lambda pair: -pair[1])
    ]
    return StepTable(
        batch=batch,
        mean_context=mean_context,
        step_us=step_us,
        timed_us=timed_us,
        idle_us=idle_us / num_steps,
        host_ms=host_ms,
        memory_share=1e6 * sum(moved for moved, _ in work.values()) / ceilings.copy_bytes_per_s / timed_us,
        experts_in_use=experts_in_use,
        rows=rows,
    )
