"""Rows with adapters give the logits of models with the adapters merged; rows without give the base model's."""

from dataclasses import replace

import numpy as np
import pytest

from model.adapter_slots import NO_SLOT, AdapterSlots, BatchAdapters, StaticAdapterRows, adapter_rows, slot_bytes
from model.config import ModelConfig
from model.families.llama import Llama
from model.ops.backend import adapter_ops
from model.ops.cpu.ops import NumpyOps
from model.ops.interface import Ops
from model.weights.loader import load_model
from model.weights.lora.adapter import read_adapter
from tests.support.adapters import ALL, merged_model, write_adapter
from tests.support.demo_engine import DEMO
from tests.support.goldens import Golden, relative_error
from tests.support.group import group_of
from tests.support.paged import PagedSequences

MAX_LEN = 64
FLOAT32 = np.dtype(np.float32)
KINDS = (
    {"rank": 8},
    {"rank": 16, "targets": ("q_proj", "v_proj"), "dtype": np.dtype(np.float16)},
    {"rank": 64, "targets": ("k_proj", "o_proj", "down_proj"), "use_rslora": True},
    {"rank": 128, "targets": ("up_proj",), "layers": (1, 3), "layers_to_transform": [1, 3]},
    {"rank": 4, "targets": ("q_proj", "gate_proj"), "rank_pattern": {"gate_proj": 2}, "alpha_pattern": {"q_proj": 3}},
)


class AdaptedSequences(PagedSequences):
    """Sequences that run with the adapters in `slots_of`, by sequence."""

    def __init__(self, model: Llama, slots: AdapterSlots, slots_of: list[int]):
        super().__init__(model, len(slots_of), MAX_LEN, 8)
        self._slots, self._slots_of = slots, slots_of

    def _batch(self, chunks):
        rows = np.concatenate([np.full(len(ids), self._slots_of[sequence]) for sequence, ids in chunks])
        adapters = BatchAdapters(self._slots, adapter_rows(rows.astype(np.int32), self._model.ops))
        return replace(super()._batch(chunks), adapters=adapters)


@pytest.fixture(scope="module")
def config():
    return ModelConfig.read(DEMO)


@pytest.fixture(scope="module")
def base(config):
    return load_model(DEMO, config, NumpyOps(), MAX_LEN)


@pytest.fixture(scope="module")
def written(tmp_path_factory, config):
    folder = tmp_path_factory.mktemp("adapters")
    return [write_adapter(folder / str(n), config, seed=n, **kind) for n, kind in enumerate(KINDS)]


def run(sequences: PagedSequences, count: int) -> list[list[np.ndarray]]:
    """Logits of a prompt of each of `count` sequences, then of two decodes, all in one batch."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(5, 900, 3 + 4 * number).astype(np.int32) for number in range(count)]
    steps = [sequences.forward(list(enumerate(prompts)))]
    for token in (7, 301):
        steps.append(sequences.forward([(number, np.array([token], np.int32)) for number in range(count)]))
    return steps


def test_mixed_ranks_in_one_batch_as_merged(config, base, written, tmp_path):
    slots = AdapterSlots(config, base.ops, base.ops, len(KINDS), 128)
    for slot, adapter in enumerate(written):
        slots.write(slot, read_adapter(adapter.folder, config, FLOAT32, 128))
    slots_of = [*range(len(KINDS)), NO_SLOT]
    together = run(AdaptedSequences(base, slots, slots_of), len(slots_of))
    plain = run(PagedSequences(base, len(slots_of), MAX_LEN, 8), len(slots_of))
    for sequence, slot in enumerate(slots_of):
        model = base if slot == NO_SLOT else merged_model(DEMO, written[slot], tmp_path / str(slot), MAX_LEN)
        wanted = run(PagedSequences(model, len(slots_of), MAX_LEN, 8), len(slots_of))
        for step, logits in enumerate(together):
            np.testing.assert_allclose(logits[sequence], wanted[step][sequence], atol=1e-4)
            differs = np.abs(logits[sequence] - plain[step][sequence]).max() > 1e-2
            assert differs == (slot != NO_SLOT)


def test_attention_of_a_model_with_experts_as_merged(tmp_path):
    golden = Golden.load("qwen3_moe_dense_layer_bf16")
    config, base = ModelConfig.read(golden.folder), golden.model(NumpyOps())
    written = write_adapter(tmp_path / "adapter", config, targets=("q_proj", "o_proj"))
    slots = AdapterSlots(config, base.ops, base.ops, 1, 8)
    slots.write(0, read_adapter(written.folder, config, FLOAT32, 8))
    tokens = [(0, golden.token_ids[:20])]
    merged = merged_model(golden.folder, written, tmp_path / "merged", MAX_LEN)
    [wanted] = PagedSequences(merged, 1, MAX_LEN, 8).forward(tokens)
    [logits] = AdaptedSequences(base, slots, [0]).forward(tokens)
    np.testing.assert_allclose(logits, wanted, atol=1e-4)
    assert np.abs(logits - golden.logits[:20]).max() > 1e-2


FAMILIES = (
    ("phi4_mini_longrope_bf16", 2, ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
    ("llama_biases_sharded_fp32", 4, ALL),
    ("qwen3_moe_dense_layer_bf16", 2, ALL[:4]),
)


@pytest.mark.parametrize(("name", "num_ranks", "targets"), FAMILIES, ids=[name for name, *_ in FAMILIES])
def test_ranks_add_what_one_rank_adds(tmp_path, name, num_ranks, targets):
    """Stacked projections whose heads rotate in part; copied KV heads and biases; layers of experts between."""
    golden = Golden.load(name)
    config = ModelConfig.read(golden.folder)
    adapters = [write_adapter(tmp_path / "8", config, targets=targets, strength=2.0)]
    adapters.append(write_adapter(tmp_path / "3", config, rank=3, seed=1, targets=targets[:1], strength=2.0))

    def logits(ops: Ops) -> list[np.ndarray]:
        slots = AdapterSlots(config, ops, adapter_ops(ops), 2, 8)
        for slot, adapter in enumerate(adapters):
            slots.write(slot, read_adapter(adapter.folder, config, FLOAT32, 8))
        steps = run(AdaptedSequences(golden.model(ops), slots, [1, 0, NO_SLOT]), 3)
        return [np.concatenate(each) for each in steps]

    for own, one in zip(logits(group_of(num_ranks)), logits(NumpyOps()), strict=True):
        assert relative_error(own, one) < 1e-5


def test_a_slot_is_overwritten_whole(config, base, written):
    """The smaller adapter leaves nothing of the larger one."""
    slots = AdapterSlots(config, base.ops, base.ops, 1, 128)
    fresh = AdapterSlots(config, base.ops, base.ops, 1, 128)
    for number in (0, 3, 1):
        slots.write(0, read_adapter(written[number].folder, config, FLOAT32, 128))
    fresh.write(0, read_adapter(written[1].folder, config, FLOAT32, 128))
    for one, other in zip(*(run(AdaptedSequences(base, each, [0]), 1) for each in (slots, fresh)), strict=True):
        np.testing.assert_array_equal(one[0], other[0])


def test_rows_are_grouped_by_slot():
    rows = adapter_rows(np.array([2, -1, 0, 2, 2, -1, 0], np.int32), NumpyOps())
    assert rows.rows.tolist() == [2, 6, 0, 3, 4]
    assert rows.tiles.tolist() == [[0, 0, 2], [2, 2, 3]]


def test_bytes_of_a_slot(config):
    slots = AdapterSlots(config, NumpyOps(), NumpyOps(), 3, 16)
    products = [slots.matrix(layer, name) for layer in range(config.num_layers) for name in ("qkv", "output")]
    products += [slots.matrix(layer, name) for layer in range(config.num_layers) for name in ("gate_up", "down")]
    assert 3 * slot_bytes(config, FLOAT32, 16) == sum(one.a.nbytes + one.b.nbytes for one in products)


def test_bytes_of_a_rank_s_slot(config):
    ops = group_of(2)
    slots = AdapterSlots(config, ops, adapter_ops(ops), 3, 16)
    names = ("qkv", "output", "gate_up", "down")
    products = [slots.matrix(layer, name) for layer in range(config.num_layers) for name in names]
    assert 3 * slot_bytes(config, FLOAT32, 16, 2) == sum(one.a.nbytes + one.b.nbytes for one in products)
    assert slot_bytes(config, FLOAT32, 16, 2) < slot_bytes(config, FLOAT32, 16)


def test_tiles_of_a_captured_step_are_of_its_own_size(config, base, monkeypatch):
    """A step on a size of few rows has tiles of few, whatever the largest size has."""
    monkeypatch.setattr(type(base.ops), "lora_tile_rows", lambda ops, num_rows: 4 if num_rows <= 16 else 8)
    static = StaticAdapterRows(AdapterSlots(config, base.ops, base.ops, 2, 8), 64)
    for num_rows, tile_rows in ((16, 4), (24, 8)):
        rows, tiles = static.host_rows(np.zeros(10, np.int32), num_rows)
        static.place([rows, tiles])
        batch = static.batch(num_rows).rows
        assert batch.tile_rows == tile_rows
        assert sum(batch.tiles[:, 2]) == 10
        assert max(batch.tiles[:, 2]) == min(10, tile_rows)
