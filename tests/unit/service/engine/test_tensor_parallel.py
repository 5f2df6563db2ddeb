"""The demo model divided among ranks, through the whole engine: it says what one rank says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from model import cuda_graphs
from model.ops.cpu.ops import NumpyOps
from model.sampling_params import SamplingParams
from model.text.grammar import regex_grammar
from service.config.settings import Settings
from service.engine.build import build_engine
from service.engine.drafting.ngram import NgramDrafter
from service.engine.request import BranchHistory, EngineRequest
from service.errors import StartupError
from tests.support.demo_engine import TWO_LAYERS, DemoEngines
from tests.support.goldens import Golden
from tests.support.group import group_of
from tests.support.received import Received, run_steps

KINDS = (
    {"temperature": 0.0},
    {"temperature": 0.8, "n": 3, "best_of": 3},
    {"temperature": 0.8, "grammar": regex_grammar("[a-z ]{5,20}")},
    {"temperature": 0.8, "repetition_penalty": 1.3, "min_tokens": 9, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 20, "logprobs": 3, "prompt_logprobs": 1},
)
PREFIX = tuple(range(40, 69))


def request_of(number: int, params: dict, history: tuple[BranchHistory, ...] = ()) -> EngineRequest:
    sampling = SamplingParams(max_tokens=18, ignore_eos=True, seed=number, **params)
    return EngineRequest(request_id=str(number), prompt=(*PREFIX, 100 + number), sampling=sampling, history=history)


def received_by(engines: DemoEngines, **options) -> dict[str, Received]:
    """Two rounds of prompts that begin alike, in a pool so small that sequences are preempted."""
    engine = engines.make(num_blocks=16, prefix_caching=True, num_host_blocks=40, **options)
    received: dict[str, Received] = {}
    for start, kinds in ((0, KINDS), (len(KINDS), KINDS[:2])):
        for number, params in enumerate(kinds, start):
            engine.add_request(request_of(number, params))
        run_steps(engine, received)
    stats = engine.stats()
    assert min(stats.num_hit_tokens, stats.num_block_copies, stats.num_preemptions, stats.num_blocks_in) > 0
    return received


def tokens(received: dict[str, Received]) -> dict[str, dict[int, list[int]]]:
    return {name: each.branches for name, each in received.items()}


@pytest.fixture(scope="module")
def one_rank() -> dict[str, Received]:
    return received_by(DemoEngines(NumpyOps(), num_layers=TWO_LAYERS))


def test_prefixes_swap_branches_and_grammars(one_rank):
    received = received_by(DemoEngines(group_of(2), num_layers=TWO_LAYERS))
    assert tokens(received) == tokens(one_rank)
    for name, each in received.items():
        for branch, logprobs in each.logprobs.items():
            expected = [one.logprob for one in one_rank[name].logprobs[branch]]
            np.testing.assert_allclose([one.logprob for one in logprobs], expected, atol=1e-4)


def test_captured_steps_that_run_ahead_as_on_gpus(one_rank, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "CHUNK_ROWS_ALONE", (32, 64))
    for name in ("CHUNK_ROWS", "CHUNK_ROWS_WITH_FEW"):
        monkeypatch.setattr(cuda_graphs, name, (16, 64))
    group = group_of(2)
    group.name = "cuda"
    with np.errstate(all="ignore"):  # padding
        assert tokens(received_by(DemoEngines(group, num_layers=TWO_LAYERS))) == tokens(one_rank)


def test_a_request_goes_on_from_one_rank_to_two_and_back(one_rank):
    whole, divided = DemoEngines(NumpyOps(), num_layers=TWO_LAYERS), DemoEngines(group_of(2), num_layers=TWO_LAYERS)
    history: tuple[BranchHistory, ...] = ()
    tokens_of: dict[int, list[int]] = {}
    for engines, num_steps in ((whole, 5), (divided, 5), (whole, 100)):
        engine, received = engines.make(), {}
        engine.add_request(request_of(1, KINDS[1], history))
        run_steps(engine, received, num_steps)
        for branch, new in received["1"].branches.items():
            tokens_of.setdefault(branch, []).extend(new)
        history = tuple(BranchHistory(token_ids=tuple(tokens_of[branch])) for branch in range(3))
    assert tokens_of == one_rank["1"].branches


def test_drafts_and_copied_heads_change_no_token(one_rank):
    engines = DemoEngines(group_of(4), num_layers=TWO_LAYERS)
    assert tokens(received_by(engines, drafter=NgramDrafter(1, 4))) == tokens(one_rank)


def test_settings_build_a_divided_engine():
    """The scales of an fp8 cache are measured on all ranks, and a first generation runs."""
    folder = str(Golden.load("llama31_bf16").folder)
    sizes = {"max_model_len": 64, "max_num_batched_tokens": 32, "num_gpu_blocks": 8, "swap_space": 0.01}
    settings = Settings(model=folder, device="cpu", kv_cache_dtype="fp8", **sizes)
    whole = build_engine(settings, progress=False)
    built = build_engine(replace(settings, tensor_parallel_size=2), progress=False)
    assert (built.memory.num_ranks, built.memory.block_bytes) == (2, whole.memory.block_bytes)
    assert built.kv_format == whole.kv_format
    assert built.executor.kv.shape[3] == 1
    assert built.executor.num_host_blocks == whole.executor.num_host_blocks > 0
    with pytest.raises(StartupError, match=r"8 does not divide 4 attention heads \(1, 2, 4\)"):
        build_engine(replace(settings, tensor_parallel_size=8), progress=False)


def test_memory_that_runs_out_is_one_line(monkeypatch):
    def full(*_: object) -> None:
        raise MemoryError("Unable to allocate 1.00 GiB")

    monkeypatch.setattr(NumpyOps, "empty", full)
    folder = str(Golden.load("llama31_bf16").folder)
    with pytest.raises(StartupError, match=r"^memory: Unable to allocate 1.00 GiB \(lower --num-gpu-blocks"):
        build_engine(Settings(model=folder, device="cpu", tensor_parallel_size=2, max_model_len=64), progress=False)
