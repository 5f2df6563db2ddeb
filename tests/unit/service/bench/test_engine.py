"""`quire bench engine` on the demo model, on the CPU."""

from __future__ import annotations

import json

import pytest

from service.bench import preemption_modes
from service.cli.main import main
from service.engine.scheduling import swap_cost

QUICK = ("--device", "cpu", "--max-model-len", "512", "--num-gpu-blocks", "128", "--max-num-seqs", "4")


@pytest.fixture(autouse=True)
def short_calibration(monkeypatch):
    """Measure the costs of swapping on 128 tokens: 2,048 take NumPy 2 s at each start."""
    monkeypatch.setattr(swap_cost, "CALIBRATION_TOKENS", 128)


@pytest.fixture
def trace(tmp_path):
    requests = [{"prompt_tokens": 5 * i, "output_tokens": 3 + i} for i in range(1, 8)]
    path = tmp_path / "few.json"
    path.write_text(json.dumps({"requests": requests}))
    return path


def bench(tmp_path, *flags) -> dict:
    out = tmp_path / "out.json"
    assert main(["bench", "engine", *QUICK, *map(str, flags), "--out", str(out)]) == 0
    return json.loads(out.read_text())


def test_a_trace_runs_to_its_end(tmp_path, trace, capsys):
    record = bench(tmp_path, "--trace", trace, "--num-requests", 5)
    assert record["num_requests"] == 5
    assert record["num_prompt_tokens"] == 75
    assert record["num_output_tokens"] == 30
    assert record["num_steps"] >= 8
    assert 0 < record["mean_running"] <= 4
    assert 0 < record["kv_waste_ratio"] < 1
    assert record["attention_gb_per_s"] > 0
    assert record["step_p50_ms"] <= record["step_p99_ms"]
    assert record["output_tokens_per_s"] == pytest.approx(30 / record["total_s"])
    assert (record["trace"], record["model"], record["device"]) == ("few", "demo", "CPU")
    assert "output tokens per s" in capsys.readouterr().out


def test_prompts_that_leave_their_answers_no_room_are_cut_and_counted(tmp_path):
    path = tmp_path / "long.json"
    lengths = [(20, 4), (600, 3), (509, 3)]
    path.write_text(json.dumps({"requests": [{"prompt_tokens": p, "output_tokens": o} for p, o in lengths]}))
    record = bench(tmp_path, "--trace", path)
    assert (record["num_shortened"], record["num_prompt_tokens"]) == (1, 20 + 509 + 509)


def test_steady_decode_of_several_batches(tmp_path, capsys):
    record = bench(tmp_path, "--batch", "1,6", "--context", 40, "--steps", 8)  # more than --max-num-seqs
    assert [row["batch"] for row in record["decode"]] == [1, 6]
    for row in record["decode"]:
        assert row["mean_context"] == pytest.approx(40, abs=8)
        assert 0 < row["step_p50_ms"] <= row["step_p99_ms"]
        assert row["output_tokens_per_s"] == pytest.approx(1e3 * row["batch"] / row["step_mean_ms"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[0] == "batch"
    assert len(lines) == 3


def test_users_of_one_prefix(tmp_path):
    record = bench(tmp_path, "--prefix", "4x100", "--own", 10, "--output", 6)
    assert (record["num_users"], record["own_tokens"], record["output_tokens"]) == (4, 10, 6)
    assert 110 <= record["computed_prompt_tokens"] < 220, "the prefix is computed once"
    assert record["most_blocks_used"] < 2 * 8 + 4 * 2
    assert record["ttft_ratio"] == pytest.approx(record["first_ttft_ms"] / record["later_ttft_ms"])


def test_decode_during_copies(tmp_path):
    record = bench(tmp_path, "--batch", 2, "--copies", "--context", 40, "--steps", 4, "--swap-space", 0.01)
    assert record["step_beside_ms"] > 0
    assert record["slowdown"] == pytest.approx(record["step_beside_ms"] / record["step_alone_ms"] - 1)
    assert record["both_gb_per_s"] == pytest.approx(record["out_gb_per_s"] + record["in_gb_per_s"])
    assert [(row["num_out"], row["num_in"]) for row in record["paced"]] == [(None, 0), (0, None), (None, None)]


def test_decode_during_copies_of_blocks_in_every_step(tmp_path, capsys):
    flags = ("--batch", 2, "--copies", "--copy-blocks", "3x2,1x4", "--context", 40, "--steps", 16, "--swap-space", 0.01)
    record = bench(tmp_path, *flags)
    more, fewer = record["paced"][3:]
    assert (more["num_out"], more["num_in"], fewer["num_out"], fewer["num_in"]) == (3, 2, 1, 4)
    for row in (more, fewer):
        assert row["slowdown"] == pytest.approx(row["step_ms"] / record["step_alone_ms"] - 1)
        assert row["out_gb_per_s"] / row["in_gb_per_s"] == pytest.approx(row["num_out"] / row["num_in"])
    assert record["paced"][0]["in_gb_per_s"] == record["paced"][1]["out_gb_per_s"] == 0
    assert "slowdown error" in capsys.readouterr().out


def test_every_preemption_mode_runs_in_the_same_small_pool(tmp_path):
    flags = ("--preemption", 4, "--pool-share", 0.9, "--swap-space", 0.01, "--no-enable-prefix-caching")
    record = bench(tmp_path, *flags, "--max-model-len", 64)
    auto, swap, recompute = record["modes"]
    assert [row["mode"] for row in record["modes"]] == ["auto", "swap", "recompute"]
    assert recompute["num_swapped"] == recompute["num_blocks_in"] == 0
    assert max(swap["ratio"], recompute["ratio"]) == 1
    assert auto["ratio"] == pytest.approx(
        auto["output_tokens_per_s"] / max(row["output_tokens_per_s"] for row in (swap, recompute))
    )
    assert record["num_blocks"] < 4 * 64 // 16
    assert not record["prefix_caching"]
    assert all(sorted(row["rounds"])[1] == row["output_tokens_per_s"] for row in record["modes"])


def test_a_slower_bus_copies_each_block_repeatedly(tmp_path, monkeypatch):
    monkeypatch.setattr(preemption_modes, "ROUNDS", 1)
    flags = ("--preemption", 4, "--pool-share", 0.9, "--swap-space", 0.01, "--max-model-len", 64, "--slower-bus", 50)
    record = bench(tmp_path, *flags)
    assert (record["bus_times_slower"], record["max_model_len"]) == (50, 64)
    _, swap, recompute = record["modes"]
    assert swap["num_swapped"] > recompute["num_swapped"] == 0


def test_prefill(tmp_path):
    record = bench(tmp_path, "--prefill", "3x50")
    assert (record["num_prompts"], record["prompt_tokens"]) == (3, 50)
    assert record["prompt_tokens_per_s"] == pytest.approx(150 / record["total_s"])


def test_branches(tmp_path):
    record = bench(tmp_path, "--prompts", "2x40", "--n", "1,4", "--beam-width", 3, "--output", 6)
    single, sampled, beams = record["branches"]
    assert [(row["method"], row["num_branches"]) for row in record["branches"]] == [
        ("sampled", 1),
        ("sampled", 4),
        ("beams", 3),
    ]
    assert single["most_blocks"] == single["most_blocks_logical"] == 2 * 3
    assert (sampled["most_blocks"], sampled["most_blocks_logical"]) == (2 * (2 + 4), 2 * 4 * 3)
    assert (single["num_copies"], sampled["num_copies"]) == (0, 2 * 3)
    for row in record["branches"]:
        assert row["output_tokens_per_s"] == pytest.approx(2 * row["num_branches"] * 6 / row["total_s"])
    assert beams["ttft_ms"] is None
    assert beams["most_blocks"] <= 2 * (2 + 3)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ([], "engine: exactly one is required"),
        (["--batch", "1", "--prefill", "1x1"], "engine: exactly one is required"),
        (["--prefill", "1x1", "--steps", "3"], "--steps: not supported with"),
        (["--batch", "1", "--num-requests", "3"], "--num-requests: not supported with"),
        (["--batch", "1,zwei"], "--batch: 'zwei' is not a whole number"),
        (["--batch", "0"], "--batch: 0 is out of range"),
        (["--prefill", "64"], "--prefill: '64' is not of the form 64x1024"),
        (["--prefill", "64x0"], "--prefill: 0 is out of range"),
        (["--batch", "1", "--context", "500"], "engine: 541 tokens a sequence are more than 512"),
        (["--prefill", "1x1", "--n", "2"], "--n: not supported with"),
        (["--prefill", "1x1", "--slower-bus", "2"], "--slower-bus: not supported with"),
        (["--batch", "1", "--copy-blocks", "3x3"], "--copy-blocks: not supported with"),
        (
            ["--batch", "1", "--context", "40", "--copies", "--copy-blocks", "70x1", "--swap-space", "0.01"],
            "--copies: too few blocks left by --batch",
        ),
        (["--prefill", "1x1", "--pool-share", "0.5"], "--pool-share: not supported with"),
        (["--preemption", "4"], "--preemption: --swap-space is missing"),
        (["--prompts", "2x8", "--n", "0"], "--n: 0 is out of range"),
        (["--prompts", "1x500"], "--prompts: the engine refuses requests of 1: too_large"),
        (["--prefill", "64x64"], "engine: that needs 320 blocks, and the pool has 128"),
    ],
)
def test_wrong_work_is_one_line(capsys, flags, complaint):
    assert main(["bench", "engine", *QUICK, "--log-level", "error", *flags]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line and "weights" not in line]
    assert len(errors) == 1
    assert errors[0].startswith(f"quire bench: {complaint}")
