"""Adapters on the device: captured against uncaptured steps, mixed batches against each row alone, loads."""

import time
from dataclasses import replace

import numpy as np
import pytest

from model.adapter_slots import NO_SLOT, AdapterSlots, BatchAdapters, adapter_rows
from model.ops.cpu.ops import NumpyOps
from model.ops.weight import Weight
from model.sampling_params import SamplingParams
from model.weights.lora.adapter import LoraAdapter, read_adapter
from service.engine.request import EngineRequest
from tests.support.adapters import source_of, write_adapter
from tests.support.demo_engine import MAX_LORA_RANK, DemoEngines
from tests.support.paged import PagedSequences
from tests.support.received import run_steps

pytestmark = pytest.mark.gpu

FLOAT32 = np.dtype(np.float32)
RANKS = (8, 16, 64, 128, 3)
BLOCK_SIZE, MAX_LEN = 8, 160


class AdaptedSequences(PagedSequences):
    def __init__(self, model, slots: AdapterSlots, slots_of: list[int]):
        super().__init__(model, len(slots_of), MAX_LEN, BLOCK_SIZE)
        self._slots, self._slots_of = slots, slots_of

    def _batch(self, chunks):
        rows = np.concatenate([np.full(len(ids), self._slots_of[sequence], np.int32) for sequence, ids in chunks])
        tile_rows = self._slots.adapter_ops.lora_tile_rows(len(rows))
        adapters = BatchAdapters(self._slots, adapter_rows(rows, self._slots.ops, tile_rows))
        return replace(super()._batch(chunks), adapters=adapters)


def forward(sequences: PagedSequences, numbers: list[int]) -> list[np.ndarray]:
    """Logits of a prompt of each of `numbers`, then of a token, in one batch."""
    prompts = [np.arange(40 + number, 60 + 3 * number, dtype=np.int32) for number in numbers]
    steps = [list(enumerate(prompts)), [(index, np.array([7], np.int32)) for index in range(len(numbers))]]
    return [np.asarray(logits, np.float32) for step in steps for logits in sequences.forward(step)]


@pytest.fixture(scope="module")
def engines(open_ops):
    return DemoEngines(open_ops("float32"))


@pytest.fixture(scope="module")
def on_numpy():
    return DemoEngines(NumpyOps(FLOAT32))


@pytest.fixture(scope="module")
def written(on_numpy, tmp_path_factory):
    folder, config = tmp_path_factory.mktemp("adapters"), on_numpy.model.config
    targets = [{}, {"targets": ("q_proj", "v_proj")}, {"targets": ("k_proj", "down_proj")}, {}, {}]
    return [
        write_adapter(folder / str(rank), config, rank=rank, seed=rank, strength=2.0, **how)
        for rank, how in zip(RANKS, targets, strict=True)
    ]


@pytest.fixture(scope="module")
def sources(written, on_numpy):
    return [source_of(one, on_numpy.model.config, FLOAT32) for one in written]


def slots_with(model, written, num_slots: int) -> AdapterSlots:
    slots = AdapterSlots(model.config, model.ops, model.ops, num_slots, MAX_LORA_RANK)
    for slot, one in enumerate(written[:num_slots]):
        slots.write(slot, read_adapter(one.folder, model.config, model.ops.dtype, MAX_LORA_RANK)).wait()
    return slots


def assert_near(actual: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    """A NaN never passes."""
    assert np.linalg.norm(actual - expected) <= tolerance * np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [("float32", "auto"), ("float16", "auto"), ("bfloat16", "auto"), ("bfloat16", "fp8")],
    ids=str,
)
def test_a_mixed_batch_equals_each_alone(open_ops, written, dtype, quantization):
    """Prompts and decodes; a row without an adapter too. fp8: a rounded base and 16-bit adapters."""
    model = DemoEngines(open_ops(dtype), quantization).model
    slots = slots_with(model, written, len(RANKS))
    slots_of = [*range(len(RANKS)), NO_SLOT, 0]
    together = forward(AdaptedSequences(model, slots, slots_of), list(range(len(slots_of))))
    base = forward(PagedSequences(model, len(slots_of), MAX_LEN, BLOCK_SIZE), list(range(len(slots_of))))
    tolerance = 1e-4 if dtype == "float32" else 3e-2
    for number, slot in enumerate(slots_of):
        alone = forward(AdaptedSequences(model, slots, [slot]), [number])
        for step, logits in enumerate(alone):
            ours, plain = (steps[step * len(slots_of) + number] for steps in (together, base))
            assert_near(ours, logits, tolerance)
            differs = np.linalg.norm(ours - plain) > 5 * tolerance * np.linalg.norm(plain)
            assert differs == (slot != NO_SLOT)


def test_logits_match_numpy(engines, on_numpy, written):
    slots_of = [0, NO_SLOT, 3, 1, 4, 2]
    logits = [
        forward(AdaptedSequences(made.model, slots_with(made.model, written, len(RANKS)), slots_of), list(range(6)))
        for made in (engines, on_numpy)
    ]
    for ours, theirs in zip(*logits, strict=True):
        assert_near(ours, theirs, 1e-4)


def requests_of(sources, count: int) -> list[EngineRequest]:
    adapters = (None, *sources)
    kinds = (
        {"temperature": 0.0},
        {"temperature": 0.8, "n": 2, "best_of": 2},
        {"temperature": 0.0, "prompt_logprobs": 1},
    )
    return [
        EngineRequest(
            request_id=str(number),
            prompt=(*range(100, 124), 200 + number % 3),
            sampling=SamplingParams(max_tokens=20, seed=number, ignore_eos=True, **kinds[number % len(kinds)]),
            adapter=adapters[number % len(adapters)],
        )
        for number in range(count)
    ]


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_adapter_slots": 5},
        {"num_adapter_slots": 2},
        {"num_adapter_slots": 1, "max_num_seqs": 3},
        {"num_adapter_slots": 3, "num_blocks": 22, "prefix_caching": True},
    ],
    ids=str,
)
def test_captured_steps_give_what_numpy_gives(engines, on_numpy, sources, sizes):
    """Adapters that share few slots and preempted sequences included."""
    received = []
    for made in (engines, on_numpy):
        engine = made.make(**{"max_num_seqs": 12, **sizes})
        for request in requests_of(sources, 18):
            engine.add_request(request)
        received.append({name: one.by_branch() for name, one in run_steps(engine).items()})
    assert received[0] == received[1]


def test_captured_steps_equal_uncaptured_ones(engines, sources, monkeypatch):
    received = []
    for is_captured in (True, False):
        engine = engines.make(num_adapter_slots=3, max_num_seqs=12)
        if not is_captured:
            monkeypatch.setattr(engine._executor.runner._graphs, "_size_of", lambda inputs: None)
            engine._executor._sampler._keeps_params = False
        for request in requests_of(sources, 12):
            engine.add_request(request)
        received.append({name: one.by_branch() for name, one in run_steps(engine).items()})
    assert received[0] == received[1]


def test_base_steps_launch_no_adapter(engines, monkeypatch):
    """The graph without adapters has no node of theirs."""
    launched = []
    launch = type(engines.model.ops).launch
    monkeypatch.setattr(
        type(engines.model.ops),
        "launch",
        lambda ops, name, *args, **how: (launched.append(name), launch(ops, name, *args, **how))[1],
    )
    engine = engines.make(num_adapter_slots=2)
    assert {"lora_shrink", "lora_expand"} <= set(launched)
    graphs = engine._executor.runner._graphs
    assert graphs._replays.keys() == graphs._adapter_replays.keys()
    launched.clear()
    graphs._run(graphs._model, graphs._batch(4, 0), engine._executor.kv)
    assert not {"lora_shrink", "lora_expand"} & set(launched)


def test_an_adapter_is_loaded_while_others_decode(engines, sources):
    """No step waits for the file or the copy: the running request gets tokens until the new one starts."""
    engine = engines.make(num_adapter_slots=2)
    running = EngineRequest(
        request_id="running", prompt=(5, 6, 7), sampling=SamplingParams(max_tokens=120, ignore_eos=True)
    )
    engine.add_request(running)
    for _ in range(5):
        engine.step()
    engine.drain_request_outputs()
    engine.add_request(replace(requests_of(sources, 2)[1], request_id="adapted"))
    begin_s, ends = time.perf_counter(), {}
    while "adapted" not in ends and time.perf_counter() - begin_s < 60:
        engine.step()
        for output in engine.drain_request_outputs():
            if output.end is not None:
                ends[output.request_id] = output.end
    assert "adapted" in ends
    assert "running" in ends or engine.running


def test_a_slot_is_written_after_the_work_before_it(open_ops):
    """Large products read the slot's old values although the write starts before they have run."""
    ops = open_ops("float16")
    weights = ops.upload(np.ones((2048, 2048), ops.dtype))
    target = ops.upload(np.ones(1 << 20, ops.dtype))
    x = ops.upload(np.ones((512, 2048), ops.dtype))
    copies = ops.empty((1 << 20,), ops.dtype)
    with ops.scratch():
        for _ in range(50):
            with ops.scratch():
                ops.linear(x, Weight(weights))
        with ops.stream:
            copies[:] = target
    ops.write_async([(target, np.full(1 << 20, 3, ops.dtype))]).wait()
    assert (ops.download(copies) == 1).all()
    assert (ops.download(target) == 3).all()


def test_values_of_any_size_arrive(open_ops, rng):
    """More than a staging buffer, and more arrays than one."""
    ops = open_ops("float16")
    hosts = [rng.standard_normal(size).astype(np.float16) for size in (1, 7, 5 << 20, 3, (2 << 20) - 1, 2 << 20)]
    targets = [ops.empty(host.shape, host.dtype) for host in hosts]
    write = ops.write_async(zip(targets, hosts, strict=True))
    write.wait()
    assert write.is_done()
    for target, host in zip(targets, hosts, strict=True):
        np.testing.assert_array_equal(ops.download(target), host)


def test_what_stops_a_write_is_raised(open_ops):
    ops = open_ops("float16")

    def values():
        yield ops.empty((1,), ops.dtype), np.zeros(1, ops.dtype)
        raise OSError("the file is gone")

    write = ops.write_async(values())
    with pytest.raises(OSError, match="the file is gone"):
        write.wait()
    with pytest.raises(OSError, match="the file is gone"):
        write.is_done()


def test_loads_during_steps_leave_other_slots_alone(engines, written):
    """A slot is rewritten while the other one computes, many times."""
    model = engines.model
    slots = slots_with(model, written, 2)
    adapters = [read_adapter(one.folder, model.config, model.ops.dtype, MAX_LORA_RANK) for one in written]
    expected = forward(AdaptedSequences(model, slots, [0]), [0])
    for turn in range(10):
        write = slots.write(1, adapters[turn % len(adapters)])
        for ours, theirs in zip(forward(AdaptedSequences(model, slots, [0]), [0]), expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        write.wait()
    empty = LoraAdapter("", 0, {}, 0)
    slots.write(0, empty).wait()
    base = forward(PagedSequences(model, 1, MAX_LEN, BLOCK_SIZE), [0])
    for ours, theirs in zip(forward(AdaptedSequences(model, slots, [0]), [0]), base, strict=True):
        assert_near(ours, theirs, 1e-5)
