"""Growth of a step to one of twice the batch or context."""

from __future__ import annotations

import pytest

from model.presets import PRESETS
from tests.bench.step_growth import growth_of, report_growth
from tests.bench.step_table import ATTENTION, OperationRow, StepTable

CONFIG = PRESETS["llama-3.1-8b"]


def table(batch: int, context: float, attention_us: float) -> StepTable:
    times_us = {ATTENTION: attention_us, "linear qkv": 300.0, "linear down": 200.0, "rope_kv_write": 40.0, "x": 10.0}
    rows = [
        OperationRow(op=op, launches=1.0, time_us=time_us, step_share=0.1, ceiling_share=None)
        for op, time_us in times_us.items()
    ]
    times = {"step_us": 1000.0, "timed_us": 600.0 + attention_us, "idle_us": 0.0, "host_ms": 0.1}
    times |= {"memory_share": 0.5, "experts_in_use": None}
    return StepTable(batch=batch, mean_context=context, rows=rows, **times)


def test_pairs_are_of_twice_the_batch_or_twice_the_context():
    tables = [table(16, 1100, 100), table(16, 2200, 190), table(32, 1100, 210), table(64, 2210, 900)]
    pairs = [(row.from_batch, row.from_context, row.to_batch, row.to_context) for row in growth_of(tables, CONFIG, 2)]
    assert dict.fromkeys(pairs) == dict.fromkeys([(16, 1100, 16, 2200), (16, 1100, 32, 1100)])


def test_each_term_is_printed_with_its_bytes_and_flops(capsys):
    rows = {row.term: row for row in growth_of([table(64, 1000, 100), table(64, 2000, 190)], CONFIG, 2)}
    assert rows["attention"].time_ratio == pytest.approx(1.9)
    assert rows["attention"].bytes_ratio == pytest.approx(2.0, rel=0.01)
    assert rows["attention"].flops_ratio is None
    assert (rows["products"].from_us, rows["products"].time_ratio) == (500.0, 1.0)
    assert rows["products"].bytes_ratio == rows["products"].flops_ratio == 1.0
    assert (rows["all else"].from_us, rows["all else"].bytes_ratio) == (50.0, 1.0)
    assert rows["step"].time_ratio == pytest.approx(790 / 700)
    assert 1.0 < rows["step"].bytes_ratio < 2.0
    report_growth(list(rows.values()))
    assert "64 to 64" in capsys.readouterr().out


def test_products_of_twice_the_rows_read_the_weights_once():
    (row,) = (row for row in growth_of([table(64, 1000, 1), table(128, 1000, 1)], CONFIG, 2) if row.term == "products")
    assert row.bytes_ratio < 1.05
    assert row.flops_ratio == pytest.approx(2.0)
