"""From the kernels of some steps, as a profiler saw them, to what each operation adds to a step and what it could take.

Kernels may begin while the one ahead still runs, and then they wait: what one adds is the time from the end of the last
one before it, or from its own beginning if that is later, to its own end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from model.config import ModelConfig
from service.bench.kernels import Ceilings

PRODUCTS = ("qkv", "output", "gate_up", "down")
"""Of a layer, in the order in which they are launched; after all layers comes that of the head."""

HEAD = "lm_head"
COPIES = "copies"
ATTENTION = "paged_decode"


@dataclass(frozen=True, slots=True)
class KernelEvent:
    """One kernel or copy of the device. Times are in microseconds of one clock."""

    name: str
    begin_us: float
    end_us: float


@dataclass(frozen=True, kw_only=True)
class OperationRow:
    """What an operation adds to a step."""

    op: str
    launches: float  # a step
    time_us: float
    step_share: float
    ceiling_share: float | None  # the least time its bytes and FLOPs take at the ceilings, over its time


@dataclass(frozen=True, kw_only=True)
class StepTable:
    """Of one batch; the mean of the profiled steps."""

    batch: int
    mean_context: float
    step_us: float  # from the first kernel to the last one's end
    timed_us: float  # the same steps without the profiler, by the host's clock
    idle_us: float  # of these, with nothing on the device
    host_ms: float  # schedule, build and settle: what a step takes besides waiting for the device
    rows: list[OperationRow]


def op_names(events: Sequence[KernelEvent], num_layers: int) -> list[str]:
    """The operation of each of some whole steps' events, in the order of their beginnings.

    Kernels of cuBLASLt are told by not being ours; a step has four of them or of our own a layer, and one for
    the head. What cuBLASLt launches besides (reductions of split products, memsets) belongs to the one before.
    """
    names, num_products, product = [], 0, PRODUCTS[0]
    for event in events:
        kind = _kind(event.name)
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
    if "nvjet" in lowered or "gemm" in lowered or "cutlass" in lowered or kernel in ("gemv", "small_m_sm90"):
        return "product"
    return kernel


def added_us(events: Iterable[KernelEvent]) -> tuple[list[float], float]:
    """What each event adds, and what lies between them. In the order of their beginnings."""
    added, idle, end = [], 0.0, None
    for event in events:
        end = event.begin_us if end is None else end
        idle += max(0.0, event.begin_us - end)
        added.append(max(0.0, event.end_us - max(end, event.begin_us)))
        end = max(end, event.end_us)
    return added, idle


def work_of(config: ModelConfig, batch: int, mean_context: float, item: int) -> dict[str, tuple[float, float]]:
    """Operation -> bytes and FLOPs of a step's worth of it, the least there can be; `item` bytes an element."""
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
    """Operation -> the least time that its bytes and FLOPs take at the ceilings."""
    return {
        name: 1e6 * max(num_bytes / ceilings.copy_bytes_per_s, num_flops / ceilings.gemm_flops_per_s)
        for name, (num_bytes, num_flops) in work.items()
    }


def table_of(
    events: Sequence[KernelEvent], num_steps: int, batch: int, mean_context: float, timed_us: float, host_ms: float,
    config: ModelConfig, item: int, ceilings: Ceilings,
) -> StepTable:  # fmt: skip
    """Of `num_steps` whole steps' events; what takes longest first."""
    events = sorted(events, key=lambda event: (event.begin_us, event.end_us))
    added, idle_us = added_us(events)
    times, launches = {}, {}
    for name, time_us in zip(op_names(events, config.num_layers), added, strict=True):
        times[name] = times.get(name, 0.0) + time_us / num_steps
        launches[name] = launches.get(name, 0) + 1
    least = least_us(work_of(config, batch, mean_context, item), ceilings)
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
