from dataclasses import replace

import numpy as np
import pytest

from model.ops.cpu.ops import NumpyOps
from model.presets import PRESETS
from model.sampling_params import SamplingParams
from service.config.settings import Settings
from service.config.speculative import SpeculativeConfig
from service.engine.build import build_engine
from service.engine.drafting.build import check_experts, check_speculation
from service.engine.request import EngineRequest
from service.errors import StartupError
from tests.support.demo_engine import DEMO

SETTINGS = Settings(model=DEMO, device="cpu", num_gpu_blocks=64, max_model_len=256, max_num_seqs=8)
NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=8, prompt_lookup_min=2)
DRAFT_MODEL = SpeculativeConfig(method="draft_model", model=DEMO, num_speculative_tokens=4)
EAGLE3 = SpeculativeConfig(method="eagle3")
SUFFIX = SpeculativeConfig(method="suffix", num_speculative_tokens=8)


@pytest.mark.parametrize(
    ("wanted", "source", "num_ranks"),
    [(NGRAM, 1, 1), (SUFFIX, 2, 1), (EAGLE3, 3, 2), (DRAFT_MODEL, 4, 1), (None, 0, 1)],
)
def test_a_built_engine_drafts_as_asked(wanted, source, num_ranks):
    settings = replace(SETTINGS, speculative_config=wanted, tensor_parallel_size=num_ranks)
    engine = build_engine(settings, progress=False).engine
    engine.speculation.lengths.cost = None  # as many as there are, however slow this machine is
    sampling = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, logit_bias=((300, 100.0),))
    engine.add_request(EngineRequest(request_id="a", prompt=(5, 6, 7), sampling=sampling))
    while engine.has_work:
        engine.step()
    drafted = engine.stats().num_drafted_by_source
    assert sum(drafted) == drafted[source]
    assert (drafted[source] > 0) == (wanted is not None)


def test_two_models_with_experts_do_not_share_a_gpu():
    class Gpu(NumpyOps):
        name = "cuda"

    dense, routed, group = PRESETS["llama-3.1-8b"], PRESETS["qwen3-30b-a3b"], Gpu()
    with pytest.raises(StartupError, match=r"^--speculative-config: two models with experts on one GPU"):
        check_experts(routed, routed, Gpu())
    group.num_ranks = 2
    for draft, model, ops in ((dense, routed, Gpu()), (routed, dense, Gpu()), (routed, routed, group)):
        check_experts(draft, model, ops)
    check_experts(routed, routed, NumpyOps())


def test_a_gpu_refuses_what_a_head_does_not_go_with():
    class Gpu(NumpyOps):
        name = "cuda"

    eagle3 = replace(SETTINGS, speculative_config=EAGLE3)
    with pytest.raises(StartupError, match=r"^--speculative-config: eagle3 on a GPU needs a cache of 16 bits"):
        check_speculation(eagle3, Gpu(np.dtype(np.float32), np.dtype(np.uint8)))
    several = Gpu()
    several.num_ranks = 2
    with pytest.raises(StartupError, match=r"^--speculative-config: eagle3 runs on one GPU"):
        check_speculation(eagle3, several)
    for wanted in (None, NGRAM, SUFFIX, DRAFT_MODEL, EAGLE3):
        check_speculation(replace(SETTINGS, speculative_config=wanted), Gpu())
    check_speculation(replace(SETTINGS, speculative_config=EAGLE3), NumpyOps())
