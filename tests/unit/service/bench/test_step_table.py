"""Time that kernels add to a step, by their starts and ends."""

from __future__ import annotations

import pytest

from model.presets import PRESETS
from service.bench.kernels import Ceilings
from tests.bench.step_table import (
    COPIES,
    PRODUCTS,
    KernelEvent,
    added_us,
    least_us,
    op_names,
    products_of,
    table_of,
    work_of,
)

CEILINGS = Ceilings(copy_bytes_per_s=4e12, gemm_flops_per_s=8e14)


def event(name: str, begin_us: float, end_us: float) -> KernelEvent:
    return KernelEvent(name, begin_us, end_us)


def step_of(num_layers: int, begin_us: float) -> list[KernelEvent]:
    """5 us a kernel, 1 us between two."""
    layer = ["nvjet_sm90_a", "rope_kv_write", "paged_decode", "gemv", "add_rms_norm"]
    layer += ["some_gemm_kernel", "silu_mul", "cutlass_80", "void cublasLt::splitKreduce_kernel<1>"]
    names = ["Memcpy HtoD (Pinned -> Device)", *layer * num_layers, "nvjet_sm90_b", "sample_tokens"]
    return [event(name, begin_us + 6 * i, begin_us + 6 * i + 5) for i, name in enumerate(names)]


def test_products_are_named_by_their_place_in_the_step():
    names = op_names(step_of(2, 0.0) + step_of(2, 1000.0), [*PRODUCTS * 2, "lm_head"])
    layer = ["linear qkv", "rope_kv_write", "paged_decode", "linear output", "add_rms_norm"]
    layer += ["linear gate_up", "silu_mul", "linear down", "linear down"]
    assert names == [COPIES, *layer * 2, "linear lm_head", "sample_tokens"] * 2


def test_the_fused_attention_of_few_rows_counts_as_attention():
    layer = ["gemv", "rope_paged_decode", "gemv", "add_rms_norm", "gemv", "silu_mul", "gemv"]
    found = op_names([event(name, i, i + 1) for i, name in enumerate([*layer, "gemv"])], [*PRODUCTS, "lm_head"])
    assert found[1] == "paged_decode"


def test_a_kernel_that_began_early_adds_what_comes_after_the_one_before():
    added, idle = added_us([event("a", 0, 10), event("b", 2, 14), event("c", 3, 12), event("d", 20, 21)])
    assert added == [10, 4, 0, 1]
    assert idle == 6


def test_a_table_adds_up_to_the_step():
    config = PRESETS["llama-3.1-8b"]
    events = step_of(config.num_layers, 0.0) + step_of(config.num_layers, 5000.0)
    table = table_of(list(reversed(events)), 2, 64, 1100.0, 900.0, 1.5, config, 2, CEILINGS)
    assert table.step_us == pytest.approx((events[-1].end_us - events[0].begin_us) / 2)
    assert sum(row.time_us for row in table.rows) + table.idle_us == pytest.approx(table.step_us)
    assert sum(row.step_share for row in table.rows) == pytest.approx(1 - table.idle_us / table.step_us)
    by_op = {row.op: row for row in table.rows}
    assert by_op["linear down"].launches == 2 * config.num_layers
    assert by_op["linear lm_head"].launches == 1
    assert by_op[COPIES].ceiling_share is None


def test_the_least_time_is_that_of_the_weights_at_few_rows_and_of_the_products_at_many():
    config = PRESETS["llama-3.1-8b"]
    few, many = (least_us(work_of(config, batch, 1000.0, 2), CEILINGS) for batch in (1, 4096))
    weights = 2 * config.num_layers * 2 * config.intermediate_size * config.hidden_size
    assert few["linear gate_up"] == pytest.approx(1e6 * weights / 4e12, rel=0.01)
    assert many["linear gate_up"] == pytest.approx(1e6 * weights * 4096 / 8e14)
    assert many["paged_decode"] == pytest.approx(4096 * few["paged_decode"])
    assert few["paged_decode"] == pytest.approx(1e6 * 1000 * 131072 / 4e12, rel=0.01)


def experts_step(num_layers: int) -> list[KernelEvent]:
    layer = ["nvjet_sm90_a", "rope_kv_write", "paged_decode", "gemv", "add_rms_norm", "nvjet_router"]
    layer += ["route_experts", "group_by_expert", "experts_gemv", "silu_mul", "gather_rows", "experts_sm90"]
    layer += ["combine_experts", "add_rms_norm"]
    names = [*layer * num_layers, "nvjet_sm90_b", "sample_tokens"]
    return [event(name, 6 * i, 6 * i + 5) for i, name in enumerate(names)]


def test_products_of_experts_are_not_products_of_layers():
    config = PRESETS["qwen3-30b-a3b"]
    names = op_names(experts_step(config.num_layers), products_of(config))
    assert names[3:14] == [
        *("linear output", "add_rms_norm", "linear router", "route_experts", "group_by_expert", "experts gate_up"),
        *("silu_mul", "gather_rows", "experts down", "combine_experts", "add_rms_norm"),
    ]
    assert names[-2:] == ["linear lm_head", "sample_tokens"]


def test_gated_products_of_experts_need_no_silu():
    config = PRESETS["qwen3-30b-a3b"]
    layer = ["gemv", "paged_decode", "gemv", "add_rms_norm", "gemv", "route_few", *["experts_gemv"] * 2, "add_rms_norm"]
    events = [event(name, 6 * i, 6 * i + 5) for i, name in enumerate([*layer * config.num_layers, "gemv"])]
    names = op_names(events, products_of(config))
    before = ["linear qkv", "paged_decode", "linear output", "add_rms_norm", "linear router", "route_few"]
    layer = [*before, "experts gate_up", "experts down", "add_rms_norm"]
    assert names == layer * config.num_layers + ["linear lm_head"]


def test_the_router_of_one_row_is_in_the_kernel_of_its_experts():
    config = PRESETS["qwen3-30b-a3b"]
    layer = ["gemv", "paged_decode", "gemv", "experts_row", "add_rms_norm"]
    events = [event(name, 6 * i, 6 * i + 5) for i, name in enumerate([*layer * config.num_layers, "gemv"])]
    layer = ["linear qkv", "paged_decode", "linear output", "experts_row", "add_rms_norm"]
    assert op_names(events, products_of(config)) == layer * config.num_layers + ["linear lm_head"]


def test_experts_in_use_are_read_once():
    config = PRESETS["qwen3-30b-a3b"]
    assert config.experts is not None
    table = table_of(
        experts_step(config.num_layers), 1, 64, 1.0, 9000.0, 1.0, config, 2, CEILINGS, {"experts down": 6 << 30}, 126.0
    )
    work = work_of(config, 64, 1.0, 2, 126.0)
    one = 2 * 2 * config.experts.intermediate_size * config.hidden_size
    assert work["experts gate_up"][0] == pytest.approx(config.num_layers * 126 * one, rel=0.01)
    down = next(row for row in table.rows if row.op == "experts down")
    assert down.ceiling_share == pytest.approx(1e6 * (6 << 30) / 4e12 / down.time_us)
    num_bytes = sum(moved for op, (moved, _) in work.items() if op != "experts down") + (6 << 30)
    assert table.memory_share == pytest.approx(1e6 * num_bytes / 4e12 / 9000.0)
    assert table.experts_in_use == 126.0
