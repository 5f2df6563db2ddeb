"""An EAGLE-3 head on the device: its logits and drafts against NumPy's, and engines with it against those without."""

import numpy as np
import pytest

from model.families.eagle3 import load_eagle3, read_eagle3
from model.families.eagle3_device import upload_eagle3
from model.ops.cpu.ops import NumpyOps
from tests.support.demo_engine import DEMO, MAX_LEN, DemoEngines, run_all
from tests.support.draft_heads import draft_alone, random_head

pytestmark = pytest.mark.gpu

PARAMS = [
    {"temperature": temperature, "seed": number, "ignore_eos": True, "max_tokens": 80}
    for number, temperature in enumerate([0.0, 0.8, 0.0, 1.0, 0.5, 0.0])
]
TOLERANCE = {"float32": 2e-4, "bfloat16": 0.06}


@pytest.fixture(scope="module")
def engines(open_ops):
    return DemoEngines(open_ops("float32"))


@pytest.fixture(scope="module")
def on_host():
    return DemoEngines(NumpyOps(np.dtype(np.float32)))


@pytest.fixture(scope="module")
def plain(on_host):
    return {name: tokens for name, (tokens, _) in run_all(on_host.make(num_blocks=400), PARAMS).items()}


def head_of(engines):
    stored = read_eagle3(DEMO / "eagle3", engines.model.config)
    return upload_eagle3(stored, engines.model.ops, engines.model.weights.embedding, MAX_LEN)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_logits_are_the_references(open_ops, rng, dtype, norm_before_residual):
    """Ragged contexts, accepted and rejected drafts, three drafts each."""
    seed = int(rng.integers(1 << 30))
    wanted = draft_alone(NumpyOps(np.dtype(np.float32)), random_head(seed, norm_before_residual=norm_before_residual))
    got = draft_alone(
        open_ops(dtype), random_head(seed, norm_before_residual=norm_before_residual), forced=wanted.drafts
    )
    np.testing.assert_array_equal(got.num_accepted, wanted.num_accepted)
    for one, other in zip(got.logits, wanted.logits, strict=True):
        np.testing.assert_allclose(one, other, atol=TOLERANCE[dtype] * np.abs(other[np.isfinite(other)]).max())
    if dtype == "float32":
        np.testing.assert_array_equal(got.drafts, wanted.drafts)


@pytest.mark.parametrize(
    "sizes",
    [{}, {"max_num_seqs": 1}, {"budget": 24}, {"num_blocks": 24, "prefix_caching": True}, {"num_host_blocks": 40}],
    ids=str,
)
def test_a_head_changes_no_token_and_accepts_as_on_the_host(engines, on_host, plain, sizes):
    """Preempted, swapped and resumed sequences too."""
    sizes = {"num_blocks": 24 if "num_host_blocks" in sizes else 400} | sizes
    engine = engines.make(draft=head_of(engines), **sizes)
    received = run_all(engine, PARAMS)
    assert {name: tokens for name, (tokens, _) in received.items()} == plain
    stats = engine.stats()
    model = on_host.model
    reference = on_host.make(
        draft=load_eagle3(DEMO / "eagle3", model.config, model.weights.embedding, MAX_LEN), **sizes
    )
    reference.speculation._max_drafts = engine.speculation._max_drafts
    run_all(reference, PARAMS)
    wanted = reference.stats().num_accepted_tokens / reference.stats().num_draft_tokens
    assert stats.num_accepted_tokens / stats.num_draft_tokens == pytest.approx(wanted, abs=0.05)
    assert stats.num_preemptions > 0 or sizes["num_blocks"] == 400


def test_a_bf16_engine_drafts_what_is_accepted(open_ops):
    engines = DemoEngines(open_ops("bfloat16"))
    engine = engines.make(draft=head_of(engines), num_blocks=400)
    run_all(engine, PARAMS)
    stats = engine.stats()
    assert stats.num_accepted_tokens > 0.4 * stats.num_draft_tokens > 50
