"""What each operation adds to a step, from the kernels that a profiler saw.

A kernel may start while the previous one runs, and then waits: it adds the time from the previous end, or its own start
if later, to its own end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from model.config import ModelConfig
from service.bench.kernels import Ceilings

PRODUCTS = ("qkv", "output", "gate_up", "down")
"""Operations of a layer, in launch order; the head's follow after all layers."""

HEAD = "lm_head"
COPIES = "copies"
ATTENTION = "paged_decode"


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
    rows: list[OperationRow]


def op_names(events: Sequence[KernelEvent], num_layers: int) -> list[str]:
    """Return the operation of each event of whole steps, in order of start.

    A product is a kernel not of ours, or our own; a step has four per layer and one for the head. Further launches of
    cuBLASLt (reductions, memsets) and pieces of many rows belong to the previous one.
    """
    names, num_products, product, previous = [], 0, PRODUCTS[0], ""
    for event in events:
        kind = "part of a product" if event.name == previous and _kind(previous) == "product" else _kind(event.name)
        previous = event.name
        if kind == "product":
            at = num_products % (len(PRODUCTS) * num_layers + 1)
            product = HEAD if at == len(PRODUCTS) * num_layers else PRODUCTS[at % len(PRODUCTS)]
            num_products += 1
        names.append(f"linear {product}" if kind in ("product", "part of a product") else kind)
    return names


def _kind(kernel: str) -> str:
    lowered = kernel.lower()
    if "memcpy" in lowered:
        return COPIES
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


def work_of(config: ModelConfig, batch: int, mean_context: float, item: int) -> dict[str, tuple[float, float]]:
    """Return least bytes and FLOPs per step by operation; `item` bytes an element."""
    layers, hidden, inner = config.num_layers, config.hidden_size, config.intermediate_size
    q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes = {
        "qkv": (q_width + 2 * kv_width, hidden, layers, item),
        "output": (hidden, q_width, layers, item),
        "gate_up": (2 * inner, hidden, layers, item),
        "down": (hidden, inner, layers, item),
        HEAD: (config.vocab_size, hidden, 1, 4),
    }
    work = {
        f"linear {name}": (count * ((n * k + batch * k) * item + batch * n * out_item), count * 2 * batch * n * k)
        for name, (n, k, count, out_item) in shapes.items()
    }
    num_bytes = {
        ATTENTION: layers * batch * (mean_context * 2 * kv_width + 2 * q_width) * item,
        "add_rms_norm": layers * 2 * 4 * batch * hidden * item,
        "silu_mul": layers * 3 * batch * inner * item,
        "rope_kv_write": layers * 2 * batch * (q_width + 2 * kv_width) * item,
        "sample_tokens": batch * config.vocab_size * 4,
    }
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
) -> StepTable:  # fmt: skip
    """Return the table of `num_steps` whole steps; the longest operation first.

    `weight_bytes` are of a layer's quantised products, whose FLOPs are counted as those of 16 bits.
    """
    events = sorted(events, key=lambda event: (event.begin_us, event.end_us))
    added, idle_us = added_us(events)
    times, launches = {}, {}
    for name, time_us in zip(op_names(events, config.num_layers), added, strict=True):
        times[name] = times.get(name, 0.0) + time_us / num_steps
        launches[name] = launches.get(name, 0) + 1
    work = work_of(config, batch, mean_context, item)
    for name, num_bytes in (weight_bytes or {}).items():
        work[f"linear {name}"] = (config.num_layers * num_bytes, work[f"linear {name}"][1])
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
        rows=rows,
    )
