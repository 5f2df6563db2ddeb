"""Adapters in an engine: each request gets its answer alone, in any batch; a bad adapter ends only its own requests."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

from model.ops.cpu.host_blocks import NumpyTransfer
from model.ops.cpu.ops import NumpyOps
from model.sampling_params import SamplingParams
from model.text.grammar import regex_grammar
from model.weights.lora.adapter import LoraAdapter
from service.config.settings import Settings
from service.engine.adapters import Adapters, check_adapters
from service.engine.drafting.ngram import NgramDrafter
from service.engine.request import AdapterSource, BranchHistory, EngineRequest
from service.engine.scheduling.adapter_slots import AdapterSlotPool
from service.engine.sequence import SequenceGroup
from service.errors import EndReason, StartupError
from tests.support.adapters import merged_model, source_of, write_adapter
from tests.support.demo_engine import DEMO, MAX_LEN, TWO_LAYERS, DemoEngines
from tests.support.group import group_of
from tests.support.received import run_steps

FLOAT32 = np.dtype(np.float32)
RANKS = (8, 16, 64, 128)
EMPTY = LoraAdapter("", 1, {}, 0)
KINDS = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.8, "n": 3, "best_of": 3, "logprobs": 2},
    {"temperature": 0.8, "grammar": regex_grammar("[a-z ]{5,40}")},
    {"temperature": 0.0, "prompt_logprobs": 1},
)


@pytest.fixture(scope="module")
def engines():
    return DemoEngines(NumpyOps(FLOAT32), num_layers=TWO_LAYERS)


@pytest.fixture(scope="module")
def sources(engines, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    written = [
        write_adapter(folder / f"r{rank}", engines.model.config, rank=rank, seed=rank, strength=2.0) for rank in RANKS
    ]
    return [source_of(one, engines.model.config, FLOAT32) for one in written]


def drawn(sources, count: int) -> list[EngineRequest]:
    """Requests that begin alike, of the base model and of every adapter."""
    requests = []
    for number in range(count):
        sampling = SamplingParams(
            max_tokens=8 + number % 5,
            seed=number,
            ignore_eos=True,
            **KINDS[(number + number // len(KINDS)) % len(KINDS)],
        )
        prompt = (*range(100, 124), 200 + number % 3)
        adapter = (None, *sources)[number % (len(sources) + 1)]
        requests.append(EngineRequest(request_id=str(number), prompt=prompt, sampling=sampling, adapter=adapter))
    return requests


def received_by(engine, requests):
    for request in requests:
        engine.add_request(request)
    return run_steps(engine)


def received_in_need(engine, requests):
    """Preempt the next victim every fifth step."""
    received, scheduler = {}, engine._scheduler
    for request in requests:
        engine.add_request(request)
    while engine.has_work:
        run_steps(engine, received, num_steps=5)
        if engine.running:
            group = scheduler.preemption._next_victim(scheduler.running)
            scheduler.preemption._preempt(group, scheduler.running)
            scheduler._requeue([group])
    return received


@pytest.fixture(scope="module")
def requests(sources):
    return drawn(sources, 10)


@pytest.fixture(scope="module")
def alone(engines, requests):
    engine = engines.make(num_adapter_slots=1)
    return {one.request_id: received_by(engine, [one])[one.request_id] for one in requests}


@pytest.mark.parametrize(
    "how",
    [
        {"num_adapter_slots": 1},
        {"num_adapter_slots": 2, "num_blocks": 40, "num_host_blocks": 20, "poisons": True},
        {"num_adapter_slots": 3, "drafter": NgramDrafter(1, 4)},
    ],
    ids=["one slot", "preempted", "drafts"],
)
def test_each_request_of_a_mixed_batch_gets_its_own_tokens(engines, requests, alone, how):
    engine = engines.make(prefix_caching=True, max_num_seqs=9, **how)
    received = received_in_need(engine, requests) if "poisons" in how else received_by(engine, requests)
    for request in requests:
        assert received[request.request_id].by_branch() == alone[request.request_id].by_branch(), request
    if "poisons" in how:
        assert engine.stats().num_preemptions > 0


def test_a_merged_model_generates_the_same(engines, sources, tmp_path):
    whole = DemoEngines(NumpyOps(FLOAT32))
    written = write_adapter(tmp_path / "adapter", whole.model.config, rank=16, strength=2.0)
    source = source_of(written, whole.model.config, FLOAT32)
    request = EngineRequest(
        request_id="one",
        prompt=tuple(range(100, 124)),
        sampling=SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True),
    )
    adapted = received_by(whole.make(num_adapter_slots=1), [replace(request, adapter=source)])["one"]
    base = received_by(whole.make(), [request])["one"]
    whole.model = merged_model(DEMO, written, tmp_path / "merged", MAX_LEN)
    assert adapted.branches == received_by(whole.make(), [request])["one"].branches != base.branches


def test_prefixes_are_found_by_adapter(engines, sources):
    """A second request of the same adapter finds its prompt; another adapter's and the base model's do not."""
    engine = engines.make(prefix_caching=True, num_adapter_slots=2)
    hits = []
    for number, adapter in enumerate((sources[0], sources[1], None, sources[0])):
        before = engine.stats().num_hit_tokens
        received_by(
            engine,
            [
                EngineRequest(
                    request_id=str(number),
                    prompt=tuple(range(100, 133)),
                    sampling=SamplingParams(max_tokens=2),
                    adapter=adapter,
                )
            ],
        )
        hits.append(engine.stats().num_hit_tokens - before)
    assert hits == [0, 0, 0, 32]


def test_ranks_generate_what_one_rank_does(requests, alone):
    """Drafts and preemption on two ranks; some requests resume from one rank's output."""
    engines = DemoEngines(group_of(2), num_layers=TWO_LAYERS)
    how = {"num_blocks": 40, "num_host_blocks": 20, "drafter": NgramDrafter(1, 4), "prefix_caching": True}
    received = received_in_need(engines.make(num_adapter_slots=2, max_num_seqs=9, **how), requests)
    for request in requests:
        assert received[request.request_id].by_branch() == alone[request.request_id].by_branch(), request
    check_resumed(engines, requests[5:8], alone)


def test_a_request_goes_on_where_another_engine_stopped(engines, requests, alone):
    check_resumed(engines, requests[1:3], alone)


def check_resumed(engines, requests, alone):
    for request in requests:
        histories = tuple(
            BranchHistory(token_ids=tuple(tokens[:4])) for tokens in alone[request.request_id].branches.values()
        )
        resumed = replace(request, history=histories, sampling=replace(request.sampling, logprobs=None))
        received = received_by(engines.make(num_adapter_slots=1), [resumed])[request.request_id]
        for branch, tokens in alone[request.request_id].branches.items():
            assert tokens[4:] == received.branches[branch]


def test_a_vector_of_an_adapter_is_its_own(engines, sources):
    request = EngineRequest(
        request_id="one", prompt=tuple(range(100, 124)), sampling=SamplingParams(max_tokens=1, pooling="mean")
    )
    engine = engines.make(num_adapter_slots=1)
    vectors = []
    for adapter in (None, sources[0]):
        engine.add_request(replace(request, adapter=adapter))
        while engine.has_work:
            engine.step()
        vectors.append(np.frombuffer(engine.drain_request_outputs()[-1].embedding, np.float32))
    assert np.abs(vectors[0] - vectors[1]).max() > 1e-3


@pytest.mark.parametrize("change", [{"path": "/nowhere"}, {"digest": "0" * 64}], ids=["gone", "changed"])
def test_an_adapter_that_cannot_be_loaded_ends_its_request_alone(engines, sources, requests, change):
    engine = engines.make(num_adapter_slots=1)
    bad = replace(requests[1], request_id="bad", adapter=replace(sources[0], **change))
    received = received_by(engine, [requests[0], bad])
    assert received["bad"].end is EndReason.ADAPTER
    assert received["0"].end is EndReason.LENGTH


def test_steps_of_the_base_model_launch_nothing_more(engines, requests, monkeypatch):
    monkeypatch.setattr(NumpyOps, "lora_shrink", None)
    engine = engines.make(num_adapter_slots=2)
    assert received_by(engine, requests[:1])["0"].end is EndReason.LENGTH


def test_without_adapters_a_request_that_names_one_ends(engines, requests, caplog):
    assert received_by(engines.make(), [requests[1]])["1"].end is EndReason.ADAPTER
    assert "no --enable-lora" in caplog.text


def test_a_step_goes_on_while_an_adapter_is_read(engines, requests, sources):
    may_read = threading.Event()
    engine = engines.make(num_adapter_slots=1)
    read = engine._adapters._read

    def slow_read(source):
        may_read.wait(30)
        return read(source)

    engine._adapters._read = slow_read
    engine.add_request(requests[1])
    engine.add_request(requests[0])
    while len(engine._output_processor.open_groups) == 2:
        engine.step()
    assert list(engine._output_processor.open_groups) == ["1"]
    may_read.set()
    assert run_steps(engine)["1"].end is EndReason.LENGTH


def test_the_last_used_stay_in_host_memory(sources):
    reads = []

    def read(source):
        reads.append(source.name)
        return replace(EMPTY, digest=source.digest)

    adapters = Adapters(read, lambda *_: NumpyTransfer(0), AdapterSlotPool(1), 2)
    for name in "abacab":
        group = SequenceGroup(
            EngineRequest(request_id=name, prompt=(1,), sampling=SamplingParams(max_tokens=1)), frozenset()
        )
        adapters.start_loading(group, AdapterSource(name=name, path=name, digest=name))
        adapters.wait(10)
        adapters.drain_loaded()
        assert group.is_loaded
        assert group.adapter.digest == name
    assert reads == ["a", "b", "c", "b"]


def test_refusals_at_start(engines):
    with pytest.raises(StartupError, match=r"--max-cpu-loras: 1 is below --max-loras \(2\)"):
        check_adapters(Settings(enable_lora=True, max_loras=2, max_cpu_loras=1))
    check_adapters(Settings(max_cpu_loras=1))
