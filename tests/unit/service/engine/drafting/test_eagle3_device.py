"""Heads that follow each step on the device, with NumPy in the GPU's place."""

from functools import partial

import numpy as np
import pytest

from model import cuda_graphs
from model.families.eagle3 import load_eagle3, read_eagle3
from model.families.eagle3_device import upload_eagle3
from model.ops.cpu.ops import NumpyOps
from model.sampling_params import SamplingParams
from model.text.grammar import regex_grammar
from service.config.settings import Settings
from service.config.speculative import SpeculativeConfig
from service.engine import build
from service.engine.drafting.eagle3_device import DeviceEagle3Drafter
from service.engine.drafting.lengths import DraftLengths
from service.engine.request import EngineRequest
from tests.support.demo_engine import DEMO, MAX_LEN, NUM_AHEAD, DemoEngines
from tests.support.received import run_steps
from tests.unit.service.engine.execution.test_executor import FLOAT32, AheadOps

PARAMS = (
    {"temperature": 0.0, "ignore_eos": True, "max_tokens": 24},
    {"temperature": 0.8, "seed": 1, "ignore_eos": True, "max_tokens": 24},
    {"temperature": 1.0, "seed": 2, "top_p": 0.9, "logprobs": 2},
    {"temperature": 0.0, "frequency_penalty": 2.0, "ignore_eos": True},
    {"temperature": 0.8, "seed": 3, "grammar": regex_grammar("[a-z ]{5,30}")},
    {"temperature": 0.8, "seed": 4, "n": 2, "best_of": 2},
    {"temperature": 0.8, "seed": 5, "stop_token_ids": tuple(range(300, 600)), "min_tokens": 4},
    {"temperature": 0.0, "max_tokens": 1},
)


def tokens_of(engine, params):
    for number, wish in enumerate(params):
        prompt = tuple(range(5 + number, 25 + 4 * number))
        sampling = SamplingParams(**{"max_tokens": 16} | wish)
        engine.add_request(EngineRequest(request_id=str(number), prompt=prompt, sampling=sampling))
    return {name: received.branches for name, received in run_steps(engine).items()}


@pytest.fixture(scope="module")
def plain():
    engines = DemoEngines(NumpyOps(FLOAT32))
    return engines, tokens_of(engines.make(num_blocks=400), PARAMS)


@pytest.fixture(scope="module")
def ahead():
    with pytest.MonkeyPatch.context() as patch:
        for name in ("CHUNK_ROWS", "CHUNK_ROWS_WITH_FEW", "CHUNK_ROWS_ALONE"):
            patch.setattr(cuda_graphs, name, (64,))
        engines = DemoEngines(AheadOps(FLOAT32))
        model = engines.model
        stored = read_eagle3(DEMO / "eagle3", model.config)
        yield partial(engines.make, draft=upload_eagle3(stored, model.ops, model.weights.embedding, MAX_LEN))


@pytest.mark.parametrize(
    "sizes", [{"num_blocks": 22, "num_host_blocks": 20, "prefix_caching": True}, {"budget": 16}], ids=str
)
def test_a_head_changes_no_token(plain, ahead, sizes):
    """Masks, penalties, branches and preemption included."""
    engine = ahead(**sizes)
    assert tokens_of(engine, PARAMS) == plain[1]
    assert engine.stats().num_accepted_by_source[3] > 15


def test_drafts_are_accepted_as_often_as_on_the_host(plain, ahead):
    model = plain[0].model
    head = load_eagle3(DEMO / "eagle3", model.config, model.weights.embedding, MAX_LEN)
    stats = []
    for engine in (ahead(num_blocks=400), plain[0].make(num_blocks=400, draft=head)):
        engine.speculation._max_drafts = NUM_AHEAD
        tokens_of(engine, PARAMS[:2])
        stats.append(engine.stats().num_accepted_per_pos[:NUM_AHEAD])
    assert stats[0] == stats[1]


def test_nothing_is_drafted_after_a_step_that_was_not_asked(ahead):
    engine = ahead()
    graphs, asked = engine.speculation._drafter._graphs, []
    draft = graphs.draft
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftLengths, "choose", lambda self, gains, *_: [0] * len(gains))
        patch.setattr(graphs, "draft", lambda *how: (asked.append(how[-1]), draft(*how))[1])
        tokens_of(engine, PARAMS[:2])
    assert set(asked) <= {NUM_AHEAD}
    assert len(asked) <= 2  # after the prompts
    assert engine.stats().num_draft_tokens == 0


def test_a_built_engine_drafts(monkeypatch):
    """Its cache has a layer more, which copies and swaps move too."""
    monkeypatch.setattr(build, "open_devices", lambda settings, config: AheadOps(np.dtype(np.float32)))
    for name in ("CHUNK_ROWS", "CHUNK_ROWS_WITH_FEW", "CHUNK_ROWS_ALONE"):
        monkeypatch.setattr(cuda_graphs, name, (64,))
    settings = Settings(
        model=DEMO, num_gpu_blocks=64, max_model_len=128, max_num_seqs=2, max_num_batched_tokens=64,
        speculative_config=SpeculativeConfig(method="eagle3"),
    )  # fmt: skip
    built = build.build_engine(settings, progress=False)
    built.engine.speculation.lengths.cost = None
    assert built.executor.kv.shape[1] == built.config.num_layers + 1
    assert isinstance(built.engine.speculation._drafter, DeviceEagle3Drafter)
    tokens_of(built.engine, PARAMS[:1])
    assert built.engine.stats().num_accepted_by_source[3] > 5
