"""`quire bench memory`: simulated, and on the demo model on the CPU."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest

from service.bench.kv_policies.runs import Run, Sweep, compare, rate_at, read_rates
from service.bench.kv_policies.simulation import MACHINES
from service.bench.trace import TracedRequest
from service.cli.main import main


@pytest.fixture(autouse=True)
def one_core(monkeypatch):
    """Simulate in this process: the start of another takes longer than most of these runs."""
    monkeypatch.setattr(os, "cpu_count", lambda: 1)


def runs(*points):
    return [SimpleNamespace(rate=rate, normalized_latency_s=latency_s) for rate, latency_s in points]


def test_where_a_curve_crosses_the_limit():
    curve = runs((1.0, 0.02), (2.0, 0.1), (3.0, 10.0))
    assert rate_at(curve, 1.0) == pytest.approx(2.5)  # halfway between 0.1 and 10, in logarithms
    assert rate_at(curve, 0.1) == pytest.approx(2.0)
    assert rate_at(curve, 20.0) == 3.0
    assert rate_at(curve, 0.01) is None
    assert rate_at([], 1.0) is None


def test_ratios_are_the_first_policys_over_the_others():
    """Compare a policy of 20 sequences and 40 tokens a second with one of 5 and 10; latencies double at what each keeps
    up with: 4 and 1 requests a second."""
    policies = [SimpleNamespace(name="a", keeps=4.0), SimpleNamespace(name="b", keeps=1.0)]

    def replay(plan):
        return [
            SimpleNamespace(
                policy=run.policy.name,
                rate=run.rate,
                mean_running=5 * run.policy.keeps,
                loaded_tokens_per_s=10 * run.policy.keeps,
                normalized_latency_s=0.01 * 10 ** (run.rate / run.policy.keeps) if run.rate else 9.0,
            )
            for run in plan
        ]

    comparison = compare(replay, policies, 10.0, Sweep(rates_of=read_rates(None, ())))
    assert comparison.latency_limit_s == pytest.approx(5 * 0.01 * 10**0.3)
    first, second = comparison.policies
    assert (first.running_ratio, first.loaded_ratio, first.limit_ratio) == (1, 1, 1)
    assert (second.running_ratio, second.loaded_ratio) == (4, 4)
    assert second.limit_ratio == pytest.approx(4)
    assert [run.rate for run in second.curve] == pytest.approx([0.3, 0.6, 0.8, 0.9, 1.0, 1.1, 1.25])
    fixed = compare(replay, policies, 10.0, Sweep(rates_of=read_rates("2,1", "ab"), latency_limit_s=0.05))
    assert [[run.rate for run in row.curve] for row in fixed.policies] == [[1.0, 2.0]] * 2
    assert fixed.policies[0].rate_at_limit == 2.0
    assert [row.is_limit_reached for row in fixed.policies] == [False, True]
    assert fixed.policies[1].limit_ratio is None
    rates_only = Sweep(rates_of=read_rates("4;b=1", "ab"), latency_limit_s=0.1, is_loaded=False)
    first, second = compare(replay, policies, 10.0, rates_only).policies
    assert (first.loaded, first.loaded_rate, second.loaded_ratio, second.running_ratio) == (None,) * 4
    assert (first.rate_at_limit, second.rate_at_limit) == (4.0, 1.0)


def test_policies_may_have_rates_of_their_own():
    names = ("paged", "oracle:buddy", "oracle:best-fit", "static-ft")
    rates_of = read_rates("30, 2x; oracle=9; oracle:best-fit = 1.5x,11", names)
    assert rates_of("paged", 20.0) == rates_of("static-ft", 20.0) == [30.0, 40.0]
    assert rates_of("oracle:buddy", 20.0) == [9.0]
    assert rates_of("oracle:best-fit", 4.0) == [6.0, 11.0]
    assert read_rates("paged=3", names)("static-ft", 20.0) == []


def test_a_rate_has_the_requests_that_come_in_time():
    requests = [TracedRequest(1, 1, arrival) for arrival in (1.0, 2.0, 4.0)]
    assert Run(policy=None).of(requests) == requests
    assert Run(policy=None, rate=2.0, seconds=1.0).of(requests) == requests[:2]
    assert Run(policy=None, rate=0.1, seconds=1.0).of(requests) == requests[:1], "an empty run would show nothing"


def test_rates_are_requests_a_second_or_times_what_a_policy_keeps_up_with(tmp_path, trace):
    flags = ("--simulate", "opt-13b-a100", "--max-model-len", 128, "--num-gpu-blocks", 40)
    rows = bench(tmp_path, "--trace", trace, *flags, "--policies", "paged,reserve-max", "--rates", "1.5x,0.1")[
        "policies"
    ]
    for row in rows:
        assert [run["rate"] for run in row["curve"]] == pytest.approx([0.1, 1.5 * row["loaded_rate"]])


def test_the_simulated_h200_costs_what_was_measured():
    """The decode steps and the prefill that it was fitted to, not those of whichever card was measured last."""
    costs = MACHINES["llama-3.1-8b-h200"].costs
    for batch, context, step_s in (
        (1, 1101, 4.06e-3),
        (64, 1108, 6.83e-3),
        (256, 1121, 15.63e-3),
        (512, 1139, 29.02e-3),
    ):
        assert costs.step_s(batch, batch * context) == pytest.approx(step_s, rel=0.07)
    assert 8 * costs.step_s(8192, 8192) == pytest.approx(1.487, rel=0.01)


def test_the_papers_machine_has_its_weights_read_in_the_time_of_its_bandwidth():
    costs = MACHINES["opt-13b-a100"].costs
    assert costs.weights_s == pytest.approx(26e9 / (0.86 * 1555e9))
    assert costs.step_s(1, 0) == costs.fixed_s + costs.weights_s
    assert costs.step_s(1000, 0) == costs.fixed_s + 1000 * costs.token_s


@pytest.fixture
def trace(tmp_path):
    requests = [
        {"prompt_tokens": 1 + 13 * i % 40, "output_tokens": 1 + 17 * i % 50, "arrival": i / 2} for i in range(60)
    ]
    path = tmp_path / "few.json"
    path.write_text(json.dumps({"requests": requests}))
    return path


def bench(tmp_path, *flags) -> dict:
    out = tmp_path / "out.json"
    assert main(["bench", "memory", *map(str, flags), "--out", str(out)]) == 0
    return json.loads(out.read_text())


def test_a_simulated_comparison(tmp_path, trace, capsys):
    flags = ("--simulate", "opt-13b-a100", "--max-model-len", 128, "--num-gpu-blocks", 40)
    record = bench(tmp_path, "--trace", trace, *flags, "--policies", "paged,oracle,reserve-max,static-hf")
    rows = {row["policy"]: row for row in record["policies"]}
    assert list(rows) == ["paged", "oracle:buddy", "reserve-max:buddy", "static-hf"]
    assert rows["reserve-max:buddy"]["loaded"]["peak_running"] == 5
    assert rows["static-hf"]["loaded"]["peak_running"] == 4
    at_once = [row["loaded"]["mean_running"] for row in rows.values()]
    assert at_once == sorted(at_once, reverse=True)
    rates = [row["loaded_rate"] for row in rows.values()]
    assert rates == sorted(rates, reverse=True)
    assert all(len(row["curve"]) == 7 for row in rows.values())
    assert (record["is_simulated"], record["num_blocks"], record["num_shortened"]) == (True, 40, 0)
    shown = capsys.readouterr().out
    assert "internal" in shown
    assert "Normalised latency" in shown


def test_a_first_policy_that_keeps_up_at_every_rate_gets_a_lower_bound(tmp_path, trace, capsys):
    flags = ("--simulate", "opt-13b-a100", "--max-model-len", 128, "--num-gpu-blocks", 40, "--only-rates")
    rates = "--rates=2;static-ft=0.5,40"
    record = bench(tmp_path, "--trace", trace, *flags, rates, "--latency-limit=0.1", "--policies=paged,static-ft")
    paged, static = record["policies"]
    assert (paged["is_limit_reached"], static["is_limit_reached"]) == (False, True)
    page = capsys.readouterr().out.splitlines()
    assert page[-2].endswith("  1.00")
    assert page[-1].endswith(f"  {static['limit_ratio']:.2f}+")


def test_a_simulation_gives_the_same_figures_in_any_number_of_processes(tmp_path, trace, monkeypatch):
    flags = ("--simulate", "llama-3.1-8b-h200", "--max-model-len", 100, "--num-gpu-blocks", 40, "--rates", 0)
    first = bench(tmp_path, "--trace", trace, *flags, "--policies", "paged,static-ft")
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert bench(tmp_path, "--trace", trace, *flags, "--policies", "paged,static-ft") == first
    assert first["policies"][0]["curve"] == []


def test_the_real_engine_under_every_policy(tmp_path):
    pytest.importorskip("matplotlib")
    trace, plot = tmp_path / "short.json", tmp_path / "figure.png"
    lengths = [(3, 5), (9, 2), (20, 6), (1, 8), (7, 7), (12, 1)]
    trace.write_text(json.dumps({"requests": [{"prompt_tokens": p, "output_tokens": o} for p, o in lengths]}))
    flags = ("--device", "cpu", "--max-model-len", 32, "--num-gpu-blocks", 6, "--rates", 0, "--plot", plot)
    record = bench(tmp_path, "--trace", trace, *flags)
    assert [row["policy"] for row in record["policies"]] == [
        "paged",
        "oracle:buddy",
        "reserve-pow2:buddy",
        "reserve-max:buddy",
        "static-ft",
        "static-hf",
        "oracle:best-fit",
        "reserve-pow2:best-fit",
        "reserve-max:best-fit",
    ]
    assert (record["device"], record["is_simulated"]) == ("CPU", False)
    for row in record["policies"]:
        assert sum(row["loaded"]["use"].values()) == pytest.approx(1)
        assert row["loaded"]["output_tokens_per_s"] > 0
    rows = {row["policy"]: row["loaded"] for row in record["policies"]}
    assert rows["paged"]["peak_running"] > rows["reserve-max:buddy"]["peak_running"] == 3
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_the_real_engine_at_a_rate(tmp_path, trace):
    flags = ("--device", "cpu", "--max-model-len", 128, "--num-requests", 3, "--policies", "paged", "--rates", 40)
    (row,) = bench(tmp_path, "--trace", trace, *flags)["policies"]
    assert row["curve"][0]["rate"] == 40
    assert row["curve"][0]["total_s"] > 1 / 40  # when the last one comes
    assert row["curve"][0]["normalized_latency_s"] > 0
    assert not row["curve"][0]["is_given_up"]


def test_a_run_that_is_plainly_over_the_limit_is_given_up(tmp_path, trace):
    """Requests that come all but at once, at a limit that none of them could keep; the simulated machine takes 20 ms a
    step. The runs end in the middle, and what they say by then is twice the limit and not much more."""
    flags = ("--simulate", "opt-13b-a100", "--max-model-len", 128, "--num-gpu-blocks", 40, "--only-rates")
    work = ("--policies", "paged,static-ft", "--rates", "60", "--seconds", 0.4, "--latency-limit", 0.01)
    record = bench(tmp_path, "--trace", trace, *flags, *work)
    for row in record["policies"]:
        (run,) = row["curve"]
        assert run["is_given_up"]
        assert run["num_requests"] == 49, "those that come within 0.4 s at 60 a second: one every half of a mean gap"
        assert 0.02 <= run["normalized_latency_s"] < 0.04
        assert run["total_s"] < 5
        assert (row["loaded"], row["rate_at_limit"]) == (None, None)
    assert record["seconds"] == 0.4


def test_the_real_engine_gives_up_and_goes_on(tmp_path, trace):
    flags = ("--device", "cpu", "--max-model-len", 128, "--num-requests", 6, "--only-rates", "--rates", "1000")
    record = bench(tmp_path, "--trace", trace, *flags, "--policies", "static-ft,paged", "--latency-limit", 1e-6)
    assert [row["curve"][0]["is_given_up"] for row in record["policies"]] == [True, True]


def test_what_is_over_within_a_step_has_no_ratio(tmp_path, trace):
    flags = ("--simulate", "llama-3.1-8b-h200", "--num-requests", 3, "--rates", 0, "--max-model-len", 2)
    record = bench(tmp_path, "--trace", trace, *flags, "--policies", "paged,static-ft")
    assert [row["running_ratio"] for row in record["policies"]] == [None, None]


def test_lengths_are_scaled_to_means(tmp_path, trace):
    flags = ("--simulate", "opt-13b-a100", "--rates", 0, "--policies", "paged")
    record = bench(tmp_path, "--trace", trace, *flags, "--mean-lengths", "19.3,58.5")
    assert (record["mean_prompt"], record["mean_output"]) == pytest.approx((19.3, 58.5), rel=0.02)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--policies", "paged,orca"], "--policies: 'orca' is not supported (paged,"),
        (["--policies", ""], "--policies: '' is not supported (paged,"),
        (["--out", "/"], "--out: / is a folder"),
        (["--max-model-len", "1"], "--max-model-len: 1 is out of range (2.."),
        (["--rates", "1,x"], "--rates: 'x' is not a number"),
        (["--latency-limit", "-1"], "--latency-limit: -1 is not above 0"),
        (["--num-requests", "0"], "--num-requests: 0 is out of range"),
        (["--rates", "1;orca=3"], "--rates: 'orca' is no policy of this comparison"),
        (["--only-rates"], "--only-rates: give --rates in requests a second"),
        (["--only-rates", "--rates", "1;oracle=2x"], "--only-rates: give --rates in requests a second"),
        (["--mean-lengths", "19"], "--mean-lengths: '19' is not of the form"),
        (["--sharing", "--seconds", "1"], "--seconds does not go with --sharing"),
        (["--sharing", "--rates", "1"], "--rates does not go with --sharing"),
        (["--num-gpu-blocks", "100"], "memory: 1600 slots hold no sequence of 2048 tokens"),
        (
            ["--num-gpu-blocks", "200", "--max-model-len", "2064"],
            "memory: oracle:buddy finds no region for 2064 tokens",
        ),
    ],
)
def test_wrong_work_is_one_line(capsys, trace, flags, complaint):
    assert main(["bench", "memory", "--trace", str(trace), "--simulate", "opt-13b-a100", *flags]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line]
    assert len(errors) == 1
    assert errors[0].startswith(f"quire bench: {complaint}")


def test_help_names_every_policy(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "memory", "--help"])
    shown = "".join(capsys.readouterr().out.split())  # lines break after hyphens too
    for word in ("paged", "oracle", "reserve-pow2", "reserve-max", "static-ft", "static-hf", "--simulate", "buddy"):
        assert word in shown
