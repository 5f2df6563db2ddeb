"""Blocks saved by sharing: by hand for one request, in a simulation, and with the demo model."""

from __future__ import annotations

import json

import pytest

from service.bench.kv_policies.sharing import measure_sharing, params_for, random_prompts, written_prompts
from service.bench.kv_policies.simulation import SimulatedClock, SimulatedSampler, StepCosts
from service.bench.trace import TracedRequest
from service.cli.main import main
from service.engine.engine import Engine
from service.engine.kv.kv_manager import KVManager
from service.engine.scheduling.limits import Limits
from service.engine.scheduling.scheduler import Scheduler
from service.errors import StartupError

COSTS = StepCosts(fixed_s=1.0, weights_s=0.0, token_s=0.0, cached_token_s=0.0)
LIMITS = Limits(max_num_seqs=16, max_num_batched_tokens=512, max_prefill_chunk=512, max_model_len=64)


def engine(num_blocks=64, block_size=4):
    return Engine(
        SimulatedSampler(SimulatedClock(), COSTS, 97), Scheduler(KVManager(num_blocks, block_size), LIMITS), frozenset()
    )


def share(method, width, *lengths, num_blocks=64):
    requests = [TracedRequest(*each, 0.0) for each in lengths]
    return measure_sharing(engine(num_blocks), random_prompts(requests, 97), requests, method, width)


def test_two_samples_share_the_prompts_full_blocks():
    """A prompt of 8 fills 2 blocks, shared for good; each branch adds one of its own with its first token. Looked at
    after each of the 4 steps: 2 + 2 held as 2, then three times 3 + 3 held as 4, and at the end nothing."""
    figures = share("parallel", 2, (8, 4))
    assert figures.logical_blocks == pytest.approx((4 + 6 + 6 + 0) / 4)
    assert figures.used_blocks == pytest.approx((2 + 4 + 4 + 0) / 4)
    assert figures.saved == pytest.approx(1 - 10 / 16)
    assert (figures.num_copies, figures.num_preemptions) == (0, 0)


def test_a_block_that_is_not_full_is_copied_when_the_first_branch_writes():
    figures = share("parallel", 3, (6, 2))
    assert figures.num_copies == 2  # the last holder writes in place
    assert figures.saved == pytest.approx(1 - 2 / 6)  # after the first step; after the second nothing is held


def test_wider_searches_save_more_and_more_than_samples():
    lengths = [(5 + 3 * number, 20 + number) for number in range(8)]
    saved = {
        (method, width): share(method, width, *lengths).saved for method in ("parallel", "beam") for width in (2, 4)
    }
    assert 0 < saved["parallel", 2] < saved["parallel", 4] < saved["beam", 4]
    assert saved["parallel", 2] < saved["beam", 2] < saved["beam", 4] < 1


def test_too_small_a_pool_is_reported():
    with pytest.raises(StartupError, match="no room for requests of 6 branches"):
        share("parallel", 6, (8, 16), num_blocks=12)


def test_options():
    assert (params_for("parallel", 4, 9, 0).num_branches, params_for("beam", 4, 9, 0).num_branches) == (4, 4)
    assert params_for("beam", 4, 9, 0).beam.width == params_for("beam", 4, 9, 0).n == 4


def test_prompts_that_a_model_writes_have_their_lengths():
    prompts = written_prompts(engine(), [1, 7, 20], 5)
    assert [len(prompt) for prompt in prompts] == [1, 7, 20]
    assert {prompt[0] for prompt in prompts} == {5}


@pytest.mark.parametrize("where", [("--simulate", "opt-13b-a100"), ("--device", "cpu", "--max-num-seqs", "24")])
def test_the_command(tmp_path, capsys, where):
    trace, out = tmp_path / "few.json", tmp_path / "out.json"
    requests = [{"prompt_tokens": 10 + 5 * number, "output_tokens": 8 + number} for number in range(2)]
    trace.write_text(json.dumps({"requests": requests}))
    assert main(["bench", "memory", "--trace", str(trace), "--sharing", *where, "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["sharing"]
    assert [(row["method"], row["width"]) for row in rows] == [
        (method, width) for method in ("parallel", "beam") for width in (2, 4, 6)
    ]
    assert all(0 < row["saved"] < 1 for row in rows)
    assert "blocks held" in capsys.readouterr().out
