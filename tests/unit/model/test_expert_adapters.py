"""Rows with adapters of experts and routers give the logits of models with the adapters merged."""

from dataclasses import replace

import numpy as np
import pytest

from model.adapter_slots import NO_SLOT, AdapterSlots, slot_bytes
from model.config import ModelConfig
from model.cuda_graphs import StepGraphs
from model.families.llama import Llama
from model.kv_cache import allocate
from model.ops.backend import adapter_ops
from model.ops.cpu.ops import NumpyOps
from model.ops.interface import Ops
from model.sampling_params import SamplingParams
from model.weights.lora.adapter import read_adapter
from service.config.settings import Settings
from service.engine.build import build_engine
from service.engine.request import AdapterSource, EngineRequest
from tests.support.adapters import merged_model
from tests.support.expert_adapters import FORMS, write_expert_adapter
from tests.support.goldens import Golden, relative_error
from tests.support.group import group_of
from tests.support.paged import PagedSequences
from tests.support.received import run_steps
from tests.support.steps import BLOCK_SIZE, MAX_BLOCKS, MAX_ROWS, by_itself, step

MAX_LEN = 64
FLOAT32 = np.dtype(np.float32)
NAMES = ("qwen3_moe_dense_layer_bf16", "mixtral_bf16", "olmoe_bf16")


class AdaptedSequences(PagedSequences):
    """Sequences that run with the adapters in `slots_of`, by sequence."""

    def __init__(self, model: Llama, slots: AdapterSlots, slots_of: list[int]):
        super().__init__(model, len(slots_of), MAX_LEN, 8)
        self._slots, self._slots_of = slots, slots_of

    def _batch(self, chunks):
        rows = np.concatenate([np.full(len(ids), self._slots_of[sequence]) for sequence, ids in chunks])
        tile_rows = self._slots.adapter_ops.lora_tile_rows(len(rows))
        arrays = self._slots.ops.upload_all(self._slots.host_rows(rows.astype(np.int32), tile_rows))
        return replace(super()._batch(chunks), adapters=self._slots.batch(arrays, tile_rows))


def run(sequences: PagedSequences, count: int) -> list[list[np.ndarray]]:
    """Logits of a prompt of each of `count` sequences, then of two decodes, all in one batch."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(5, 120, 3 + 4 * number).astype(np.int32) for number in range(count)]
    steps = [sequences.forward(list(enumerate(prompts)))]
    for token in (7, 101):
        steps.append(sequences.forward([(number, np.array([token], np.int32)) for number in range(count)]))
    return steps


def slots_with(config: ModelConfig, ops: Ops, folders, num_slots: int, max_rank: int = 8) -> AdapterSlots:
    slots = AdapterSlots(config, ops, adapter_ops(ops), num_slots, max_rank, with_experts=True)
    for slot, folder in enumerate(folders):
        slots.write(slot, read_adapter(folder, config, FLOAT32, max_rank, with_experts=True)).wait()
    return slots


@pytest.mark.parametrize("name", NAMES)
def test_a_mixed_batch_as_merged(tmp_path, name):
    """Every form, ranks that leave rows of a slot unused, experts without tensors, a row without an adapter."""
    golden = Golden.load(name)
    config, base = ModelConfig.read(golden.folder), golden.model(NumpyOps())
    kinds = [{"form": form, "rank": 3 if form == "fused" else 4} for form in FORMS]
    kinds.append({"form": "each", "experts": (0, 2), "with_router": False, "rank": 8})
    written = [write_expert_adapter(tmp_path / str(n), config, seed=n, **kind) for n, kind in enumerate(kinds)]
    slots_of = [*range(len(written)), NO_SLOT, 0]
    slots = slots_with(config, base.ops, [one.folder for one in written], len(written))
    together = run(AdaptedSequences(base, slots, slots_of), len(slots_of))
    plain = run(PagedSequences(base, len(slots_of), MAX_LEN, 8), len(slots_of))
    for sequence, slot in enumerate(slots_of):
        model = (
            base if slot == NO_SLOT else merged_model(golden.folder, written[slot], tmp_path / f"m{sequence}", MAX_LEN)
        )
        wanted = run(PagedSequences(model, len(slots_of), MAX_LEN, 8), len(slots_of))
        for logits, of_merged, of_base in zip(together, wanted, plain, strict=True):
            np.testing.assert_allclose(logits[sequence], of_merged[sequence], atol=1e-4)
            differs = np.abs(logits[sequence] - of_base[sequence]).max() > 1e-2
            assert differs == (slot != NO_SLOT)


@pytest.mark.parametrize("form", ["each", "stacks"])
def test_ranks_add_what_one_rank_adds(tmp_path, form):
    golden = Golden.load("qwen3_moe_dense_layer_bf16")
    config = ModelConfig.read(golden.folder)
    folders = [write_expert_adapter(tmp_path / str(n), config, form, seed=n, rank=4 - n).folder for n in range(2)]

    def logits(ops: Ops) -> list[np.ndarray]:
        slots = slots_with(config, ops, folders, 2)
        steps = run(AdaptedSequences(golden.model(ops), slots, [1, 0, NO_SLOT]), 3)
        return [np.concatenate(each) for each in steps]

    for own, one in zip(logits(group_of(2)), logits(NumpyOps()), strict=True):
        assert relative_error(own, one) < 1e-5


def test_a_slot_is_overwritten_whole(tmp_path):
    """The adapter with experts leaves nothing to one without, nor a larger one to a smaller."""
    golden = Golden.load("qwen3_moe_bf16")
    config, base = ModelConfig.read(golden.folder), golden.model(NumpyOps())
    kinds = ({"rank": 8}, {"form": "stacks", "rank": 4}, {"rank": 2, "with_router": False, "experts": (1,)})
    written = [write_expert_adapter(tmp_path / str(n), config, seed=n, **kind) for n, kind in enumerate(kinds)]
    slots, fresh = slots_with(config, base.ops, [one.folder for one in written[:1]], 1), None
    for one in written[1:]:
        slots.write(0, read_adapter(one.folder, config, FLOAT32, 8, with_experts=True)).wait()
        fresh = slots_with(config, base.ops, [one.folder], 1)
    for one, other in zip(*(run(AdaptedSequences(base, each, [0]), 1) for each in (slots, fresh)), strict=True):
        np.testing.assert_array_equal(one[0], other[0])


def test_slots_without_experts_leave_the_fused_path(tmp_path, monkeypatch):
    golden = Golden.load("qwen3_moe_bf16")
    config, base = ModelConfig.read(golden.folder), golden.model(NumpyOps())
    monkeypatch.setattr(NumpyOps, "lora_add", None)
    slots = AdapterSlots(config, base.ops, base.ops, 1, 8)
    run(AdaptedSequences(base, slots, [0]), 1)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # padding rows of attention are undefined
def test_captured_steps_match_eager_ones(tmp_path):
    """Decodes and chunks of mixed adapters, and the same without, on padded rows."""
    golden = Golden.load("qwen3_moe_dense_layer_bf16")
    config, model = ModelConfig.read(golden.folder), golden.model(NumpyOps())
    folders = [write_expert_adapter(tmp_path / form, config, form, seed=1).folder for form in ("each", "stacks")]
    slots = slots_with(config, model.ops, folders, 2)
    kv = allocate(model.ops, config, MAX_ROWS * MAX_BLOCKS, BLOCK_SIZE)
    kv[:] = 0
    graphs = StepGraphs(model, np.arange(MAX_ROWS, dtype=np.int32), MAX_ROWS, MAX_BLOCKS)
    graphs.capture(kv, adapters=slots)
    for chunks, slots_of in (([(20, 1), (0, 1), (9, 1)], [1, NO_SLOT, 0]), ([(3, 1), (0, 30)], [1, 0])):
        rows = np.repeat(np.array(slots_of, np.int32), [length for _, length in chunks])
        inputs = replace(step(model, chunks), adapter_slots=rows)
        wanted = by_itself(model, kv.copy(), inputs, adapters=slots)
        base = by_itself(model, kv.copy(), inputs)
        np.testing.assert_allclose(graphs.forward(replace(inputs, adapter_slots=None)), base, atol=2e-4)
        logits = np.array(graphs.forward(replace(inputs, dirty_tables=np.ones_like(inputs.dirty_tables))))
        np.testing.assert_allclose(logits, wanted, atol=2e-4)
        assert (np.abs(logits - base).max(axis=1) > 1e-2).tolist() == [slot != NO_SLOT for slot in slots_of]


def test_an_engine_generates_what_the_merged_model_does(tmp_path):
    """Requests of an adapter with experts and of the base model; memory is planned for the slots."""
    golden = Golden.load("qwen3_moe_bf16")
    config = ModelConfig.read(golden.folder)
    written = write_expert_adapter(tmp_path / "adapter", config, "stacks", strength=2.0)
    merged_model(golden.folder, written, tmp_path / "merged", MAX_LEN)
    tokens = {}
    for name, folder in (("base", golden.folder), ("merged", tmp_path / "merged"), ("adapted", golden.folder)):
        settings = Settings(
            model=folder, device="cpu", dtype="float32", num_gpu_blocks=32, max_num_seqs=4, enable_lora=True,
            lora_experts=True, max_lora_rank=8,
        )  # fmt: skip
        built = build_engine(settings, progress=False)
        source = None
        if name == "adapted":
            read = read_adapter(written.folder, config, FLOAT32, 8, with_experts=True)
            source = AdapterSource(name="own", path=str(written.folder), digest=read.digest)
        sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        for number in range(4):
            own = source if number % 2 else None
            prompt = tuple(range(5 + number, 20))
            request = EngineRequest(request_id=str(number), prompt=prompt, sampling=sampling, adapter=own)
            built.engine.add_request(request)
        received = run_steps(built.engine)
        tokens[name] = [received[str(number)].by_branch()[0][0] for number in range(4)]
    assert tokens["adapted"] == [tokens["merged" if number % 2 else "base"][number] for number in range(4)]
    assert tokens["merged"] != tokens["base"]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_bytes_of_a_slot(num_ranks):
    golden = Golden.load("qwen3_moe_dense_layer_bf16")
    config = ModelConfig.read(golden.folder)
    ops = NumpyOps() if num_ranks == 1 else group_of(num_ranks)
    slots = AdapterSlots(config, ops, adapter_ops(ops), 3, 16, with_experts=True)
    products = [matrix for layer in slots._layers for matrix in layer.values()]
    assert 3 * slot_bytes(config, FLOAT32, 16, num_ranks, with_experts=True) == sum(
        one.a.nbytes + one.b.nbytes for one in products
    )
    assert slot_bytes(config, FLOAT32, 16, num_ranks) < slot_bytes(config, FLOAT32, 16, num_ranks, with_experts=True)
