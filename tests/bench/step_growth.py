"""Growth of a decode step with twice the batch or context, against its bytes and FLOPs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

from model.config import ModelConfig
from service.cli.table import print_grid
from tests.bench.step_table import ATTENTION, StepTable, work_of

MAX_OFF = 0.05
"""Tolerance of a ratio that counts as once or twice: contexts grow during a measurement."""

TERMS = ("attention", "products", "all else")


@dataclass(frozen=True, kw_only=True)
class Growth:
    """Ratios of time, bytes and FLOPs from one step to another."""

    from_batch: int
    from_context: float
    to_batch: int
    to_context: float
    term: str  # one of TERMS, or "step"
    from_us: float
    to_us: float
    time_ratio: float
    bytes_ratio: float
    flops_ratio: float | None  # None for next to none


def growth_of(tables: Sequence[StepTable], config: ModelConfig, item: int) -> list[Growth]:
    """Return the growth of all pairs with twice the batch or context; `item` bytes an element."""
    found = []
    for before, after in permutations(tables, 2):
        batches, contexts = after.batch / before.batch, after.mean_context / before.mean_context
        if any(
            abs(a - 2) <= 2 * MAX_OFF and abs(b - 1) <= MAX_OFF for a, b in ((batches, contexts), (contexts, batches))
        ):
            found += _pair(before, after, config, item)
    return found


def _pair(before: StepTable, after: StepTable, config: ModelConfig, item: int) -> list[Growth]:
    (old_us, old_work), (new_us, new_work) = (_terms(table, config, item) for table in (before, after))
    old_us["step"], new_us["step"] = before.timed_us, after.timed_us
    rows = []
    for term in (*TERMS, "step"):
        (old_bytes, old_flops), (new_bytes, new_flops) = old_work[term], new_work[term]
        rows.append(
            Growth(
                from_batch=before.batch,
                from_context=before.mean_context,
                to_batch=after.batch,
                to_context=after.mean_context,
                term=term,
                from_us=old_us[term],
                to_us=new_us[term],
                time_ratio=new_us[term] / old_us[term],
                bytes_ratio=new_bytes / old_bytes,
                flops_ratio=new_flops / old_flops if old_flops else None,
            )
        )
    return rows


def _terms(table: StepTable, config: ModelConfig, item: int) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
    """Return microseconds by term, and bytes and FLOPs by term."""
    times_us, work = dict.fromkeys(TERMS, 0.0), dict.fromkeys((*TERMS, "step"), (0.0, 0.0))
    for row in table.rows:
        times_us[_term(row.op)] += row.time_us
    for op, (num_bytes, num_flops) in work_of(
        config, table.batch, table.mean_context, item, table.experts_in_use
    ).items():
        for term in (_term(op), "step"):
            work[term] = work[term][0] + num_bytes, work[term][1] + num_flops
    return times_us, work


def _term(op: str) -> str:
    return "attention" if op == ATTENTION else "products" if op.startswith(("linear ", "experts ")) else "all else"


def report_growth(rows: Sequence[Growth]) -> None:
    if not rows:
        return
    print()
    header = ("sequences", "context", "term", "us", "us then", "times", "its bytes", "its FLOPs")
    print_grid(
        header,
        [
            (
                f"{row.from_batch} to {row.to_batch}",
                f"{row.from_context:.0f} to {row.to_context:.0f}",
                row.term,
                f"{row.from_us:,.0f}",
                f"{row.to_us:,.0f}",
                f"{row.time_ratio:.2f}",
                f"{row.bytes_ratio:.2f}",
                "-" if row.flops_ratio is None else f"{row.flops_ratio:.2f}",
            )
            for row in rows
        ],
    )
