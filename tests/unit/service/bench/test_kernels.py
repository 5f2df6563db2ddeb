"""`quire bench kernels` on the CPU: every operation is there, and its figures follow from its time."""

from __future__ import annotations

import json

import pytest

from service.bench import kernels
from service.bench.cases.kernel_cases import Case
from service.bench.kernels import Ceilings, figures_of
from service.cli.main import main
from tests.support.kernel_table import kernels_of, read_readme

NOT_MEASURED = {
    "upload_all", "quantise_rows", "dequantise_rows", "rms_norm_quantised", "add_rms_norm_quantised",
    "silu_mul_quantised", "prepare_weight", "normalise_qk", "gated_mlp", "add_norm_gated_mlp",
    "route_to_groups", "route_experts", "group_by_expert", "experts_linear", "combine_experts",  # test_expert_cases.py
    "add_norm_experts", "add_norm_linear", "rope_decode_attention",  # tests/bench/step_profile.py
    "lora_shrink", "lora_expand", "lora_linear",  # tests/bench/adapters_gpu.py
    "lora_add",  # tests/bench/expert_adapters_gpu.py
    "draft_input", "place_columns", "plan_drafts", "spread_logits",  # tests/bench/eagle3_gpu.py
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def one_round():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "ROUNDS", 1)
        yield


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    out = tmp_path_factory.mktemp("bench") / "kernels.json"
    assert main(["bench", "kernels", "--device", "cpu", "--out", str(out)]) == 0
    return json.loads(out.read_text())


def test_every_operation_with_a_kernel_is_measured(record):
    operations = set(kernels_of(read_readme()).values())
    assert {each["op"] for each in record["kernels"]} == operations - NOT_MEASURED


def test_the_ceilings_are_of_the_same_run(record):
    assert record["copy_bytes_per_s"] > 1e8
    assert record["gemm_flops_per_s"] > 1e8
    for each in record["kernels"]:
        assert each["time_us"] > 0
        assert each["ceiling_share"] > 0
        assert each["torch_us"] is None


def case(num_bytes, num_flops):
    return Case("op", "size", num_bytes, num_flops, lambda _: lambda: None)


@pytest.mark.parametrize(
    ("num_bytes", "num_flops", "share", "bound"),
    [(1000, 0, 0.5, "bytes"), (1000, 5000, 0.5, "bytes"), (1000, 20000, 1.0, "flops")],
)
def test_the_share_is_of_whichever_ceiling_binds(num_bytes, num_flops, share, bound):
    ceilings = Ceilings(copy_bytes_per_s=1e6, gemm_flops_per_s=1e7)
    figures = figures_of(case(num_bytes, num_flops), 2e-3, 4e-3, ceilings)
    assert figures.ceiling_share == pytest.approx(share)
    assert figures.bound == bound
    assert figures.time_us == pytest.approx(2000)
    assert figures.torch_ratio == pytest.approx(2)


def test_one_operation_alone(capsys):
    assert main(["bench", "kernels", "--device", "cpu", "--only", "copy_blocks"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[0].startswith("CPU, float32: copies ")
    assert [row.split()[0] for row in rows[2:]] == ["op", "copy_blocks"]


def test_an_fp8_cache_moves_fewer_bytes(capsys, tmp_path):
    moved = []
    for kv in ("auto", "fp8"):
        out = tmp_path / f"{kv}.json"
        flags = ["--device", "cpu", "--kv-cache-dtype", kv, "--only", "copy_blocks", "--out", str(out)]
        assert main(["bench", "kernels", *flags]) == 0
        (copied,) = json.loads(out.read_text())["kernels"]
        moved.append(copied["gb_per_s"] * copied["time_us"])
    assert moved[1] == pytest.approx(moved[0] / 4)  # float32 on a CPU


def test_an_operation_that_does_not_exist_is_one_line(capsys):
    assert main(["bench", "kernels", "--device", "cpu", "--only", "divination"]) == 2
    assert capsys.readouterr().err == "quire bench: --only: no operation's name contains 'divination'\n"
