"""Steps on captured sizes against the same steps by themselves; on NumPy, where what is captured is run again."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from model import cuda_graphs
from model.adapter_slots import NO_SLOT, AdapterSlots, BatchAdapters, adapter_rows
from model.batch import Batch
from model.config import ModelConfig
from model.cuda_graphs import CHUNK_ROWS, CHUNK_ROWS_ALONE, CHUNK_ROWS_WITH_FEW, MAX_CHUNKS, StepGraphs, decode_sizes
from model.families.llama import Llama
from model.kv_cache import block_shape
from model.ops.collectives import NumpyCollectives
from model.ops.cpu.ops import NumpyOps
from model.ops.group.arrays import Section, Split, SplitArray
from model.ops.group.device import upload_parts
from model.ops.group.ops import GroupOps
from model.ops.interface import MAX_EXACT_ROWS
from model.step_inputs import ForwardInputs
from model.weights.loader import load_model
from model.weights.lora.adapter import read_adapter
from tests.support.adapters import write_adapter
from tests.support.demo_engine import DEMO
from tests.support.steps import BLOCK_SIZE, MAX_BLOCKS, MAX_ROWS, by_itself, step


class QuietOps(NumpyOps):
    """Padding is computed from undefined memory, of which NumPy would warn."""

    def temporary(self, shape, dtype):
        return np.zeros(shape, dtype)


@pytest.fixture(scope="module")
def model() -> Llama:
    return load_model(DEMO, ModelConfig.read(DEMO), QuietOps(np.dtype(np.float32)), MAX_BLOCKS * BLOCK_SIZE)


@pytest.fixture(scope="module")
def kv(model) -> np.ndarray:
    shape = (MAX_ROWS * MAX_BLOCKS, *block_shape(model.config, BLOCK_SIZE))
    return np.random.default_rng(1).standard_normal(shape, np.float32)


@pytest.fixture(scope="module")
def graphs(model, kv) -> StepGraphs:
    made = StepGraphs(model, np.arange(MAX_ROWS, dtype=np.int32), MAX_ROWS, MAX_BLOCKS)
    made.capture(kv)
    return made


def uncaptured(model: Llama, kv: np.ndarray, inputs: ForwardInputs, adapters: BatchAdapters) -> np.ndarray:
    batch = Batch(
        token_ids=inputs.token_ids,
        positions=inputs.positions,
        slots=inputs.slots,
        block_tables=inputs.block_tables(np.arange(inputs.num_decodes), BLOCK_SIZE),
        context_lens=inputs.context_lens,
        query_start=inputs.query_start,
        logit_rows=inputs.logit_rows,
        num_decodes=inputs.num_decodes,
        num_tokens=len(inputs.token_ids),
        num_sequences=len(inputs.context_lens),
        max_query_len=int(inputs.chunk_lens.max(initial=0)),
        adapters=adapters,
    )
    return model.forward(batch, kv)


@pytest.mark.parametrize(
    "chunks",
    [
        [(5, 1)],
        [(20, 1), (0, 1), (150, 1)],
        [(7, 1)] * MAX_ROWS,
        [(0, 9)],
        [(40, 30), (0, 50)],
        [(3, 1), (0, 30), (64, 17)],
        [(50, 1)] * 7 + [(0, 2)],
        [(11, 1)] * 5 + [(0, 70), (120, 60)],
    ],
    ids=str,
)
def test_logits_match_each_sequence_alone(model, kv, graphs, chunks):
    inputs, before = step(model, chunks), kv.copy()
    logits = graphs.forward(inputs)
    np.testing.assert_allclose(logits, by_itself(model, before, inputs), atol=2e-4)


def test_captured_steps_of_a_group_have_its_parts_of_the_logits(model, kv, graphs, monkeypatch):
    for name in ("CHUNK_ROWS", "CHUNK_ROWS_WITH_FEW", "CHUNK_ROWS_ALONE"):
        monkeypatch.setattr(cuda_graphs, name, (8,))
    ops = GroupOps([QuietOps(np.dtype(np.float32)) for _ in range(2)], NumpyCollectives())
    divided = load_model(DEMO, model.config, ops, MAX_BLOCKS * BLOCK_SIZE)
    sampled = ops.upload(np.arange(MAX_ROWS, dtype=np.int32))
    of_group = StepGraphs(divided, sampled, MAX_ROWS, MAX_BLOCKS)
    of_group.capture(upload_parts(ops, kv, Split(3, (Section(kv.shape[3]),))))
    logits = of_group.forward(step(model, [(20, 1), (7, 1)]))
    assert isinstance(logits, SplitArray)
    np.testing.assert_allclose(ops.download(logits), graphs.forward(step(model, [(20, 1), (7, 1)])), atol=2e-4)


@pytest.mark.parametrize("verifies_drafts", [False, True])
def test_only_rows_of_different_sequences_are_rotated_and_attended_at_once(model, kv, monkeypatch, verifies_drafts):
    """A row with drafts reads the keys that its neighbours write."""
    asked, run = [], model.ops.rope_decode_attention

    def recorded(qkv, *args):
        asked.append(len(qkv))
        return run(qkv, *args)

    monkeypatch.setattr(model.ops, "rope_decode_attention", recorded)
    made = StepGraphs(model, np.arange(MAX_ROWS, dtype=np.int32), MAX_ROWS, MAX_BLOCKS, verifies_drafts=verifies_drafts)
    made.capture(kv)
    asked.clear()
    inputs = step(model, [(20, 1), (7, 1)])
    made.forward(inputs)
    assert asked == [2] * model.config.num_layers
    made.forward(replace(inputs, num_draft_rows=2))
    assert len(asked) == model.config.num_layers * (1 if verifies_drafts else 2)
    made.forward(step(model, [(3, 1), (0, 30)]))
    assert len(asked) == model.config.num_layers * (1 if verifies_drafts else 2)


def test_padding_writes_no_key(model, kv, graphs):
    inputs, before = step(model, [(30, 1), (8, 5)]), kv.copy()
    graphs.forward(inputs)
    blocks, offsets = np.divmod(inputs.slots, BLOCK_SIZE)
    changed = np.argwhere((kv != before).any(axis=(1, 2, 3, 5)))
    assert {tuple(place) for place in changed.tolist()} == set(zip(blocks.tolist(), offsets.tolist(), strict=True))


def test_tokens_that_the_step_before_sampled_come_from_its_row(model, graphs):
    inputs = step(model, [(30, 1), (31, 1)])
    known = np.array(graphs.forward(inputs))
    inputs.pending_token_row[:] = [MAX_ROWS, 3]
    graphs._sampled[3], inputs.token_ids[1] = inputs.token_ids[1], 0
    np.testing.assert_array_equal(graphs.forward(inputs), known)


def test_rows_with_drafts_have_captures_of_their_own(model, kv, monkeypatch):
    for name in ("CHUNK_ROWS", "CHUNK_ROWS_WITH_FEW", "CHUNK_ROWS_ALONE"):
        monkeypatch.setattr(cuda_graphs, name, (8,))

    class ExactOps(QuietOps):
        is_exact = False

        @contextmanager
        def exact_rows(self):
            self.is_exact = True
            yield
            self.is_exact = False

        def plan_decode_attention(self, num_heads, batch):
            planned.append((len(batch.context_lens), self.is_exact, batch.drafted))

    ops, planned, num_rows = ExactOps(np.dtype(np.float32)), [], 2 * MAX_EXACT_ROWS
    first = Llama(model.config, ops, model.weights).first_layer()
    exact = StepGraphs(first, np.arange(num_rows, dtype=np.int32), num_rows, 4, verifies_drafts=True)
    exact.capture(kv)
    plain = replace(step(model, [(9, 1), (10, 1), (11, 1)]), tables=np.zeros((3, 4), np.int32))
    for inputs in (plain, replace(plain, num_draft_rows=2), replace(plain, num_draft_rows=3)):
        exact.forward(inputs)
    assert planned[-3:] == [(4, False, False), (3, True, True), (3, True, True)]
    assert exact._drafted[-4:] == [MAX_EXACT_ROWS, 32, 40, num_rows]
    many = replace(step(model, [(9, 1)] * (MAX_EXACT_ROWS + 8)), tables=np.zeros((MAX_EXACT_ROWS + 8, 4), np.int32))
    for num_draft_rows in (0, MAX_EXACT_ROWS + 8):
        assert exact.forward(replace(many, num_draft_rows=num_draft_rows)) is not None
        assert planned[-1] == (MAX_EXACT_ROWS + 8, False, num_draft_rows > 0)
    seconds = exact.decode_seconds()
    assert len(seconds) == num_rows
    assert seconds[9] == seconds[11]  # one size
    assert StepGraphs(first, np.arange(11, dtype=np.int32), 11, 4, verifies_drafts=True)._drafted == [*range(2, 10), 11]
    assert StepGraphs(first, np.arange(1, dtype=np.int32), 1, 4, verifies_drafts=True)._drafted == []


def test_what_fits_no_size_is_left_to_the_caller(model, graphs):
    assert graphs.forward(step(model, [(0, 180)] * 3)) is None
    chunk = step(model, [(0, 2)])
    too_many = replace(chunk, chunk_lens=np.repeat(chunk.chunk_lens, MAX_CHUNKS + 1))
    assert graphs.forward(too_many) is None
    many_drafts = step(model, [(0, 50)])
    assert graphs._size_of(many_drafts) == (0, CHUNK_ROWS_ALONE[2])
    assert graphs._size_of(replace(many_drafts, logit_rows=np.arange(40))) == (MAX_ROWS, 48)
    assert graphs._size_of(replace(many_drafts, logit_rows=np.arange(MAX_ROWS + MAX_CHUNKS + 1))) is None


def test_every_decode_size_with_chunks_has_a_time_shared_by_sizes_of_equal_rows(model, kv):
    graphs = StepGraphs(model, np.arange(80, dtype=np.int32), 80, MAX_BLOCKS)
    graphs.capture(kv)
    beside = {0: CHUNK_ROWS_ALONE, 16: CHUNK_ROWS_WITH_FEW, 64: CHUNK_ROWS, 80: CHUNK_ROWS}
    assert set(graphs._seconds) == {(decodes, more) for decodes, rows in beside.items() for more in rows}
    assert graphs._seconds[16, 128] == graphs._seconds[80, 64] != graphs._seconds[16, 64]


def test_tokens_are_left_for_the_next_step_where_a_smaller_size_is_clearly_quicker(graphs, monkeypatch):
    seconds = {(MAX_ROWS, more): 1.0 if more <= 128 else 2.0 + more / 1000 for more in CHUNK_ROWS_WITH_FEW}
    monkeypatch.setattr(graphs, "_seconds", seconds)
    assert graphs.fit(10, 128 + 2 + 30) == 128 + 2
    assert graphs.fit(10, 128 + 2) == 128 + 2
    assert graphs.fit(10, 64 + 2 + 1) == 64 + 2 + 1
    assert graphs.fit(10, 512 + 2) == 512 + 2  # 4 times the rows in 2.5 times the time
    assert graphs.fit(10, 512 + 3) == 512 + 3  # in no captured size
    assert graphs.fit(MAX_ROWS, 1) == 1


def test_the_last_words_of_a_prompt_find_a_step_of_their_size(model, graphs):
    decodes = graphs._decodes_with_chunks[0]
    for num_tokens, more in ((2, 16), (decodes + 15, 16), (decodes + 16, 48), (decodes + 48, 64)):
        assert graphs._size_of(step(model, [(9, 1), (0, num_tokens)])) == (decodes, more)
    for num_tokens, rows in ((2, 32), (33, 48), (64, 64), (128, 128)):
        assert graphs._size_of(step(model, [(0, num_tokens)])) == (0, rows)
    assert graphs._size_of(step(model, [(0, 129)])) == (decodes, 128)


def test_decode_sizes_end_with_the_most_and_leave_little_to_padding():
    for most in (1, 3, 8, 100, 512, 1024):
        sizes = decode_sizes(most)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == most
        assert all(larger <= max(smaller + 8, 1.2 * smaller) for smaller, larger in pairwise(sizes[3:]))


def test_steps_with_adapters_replay_a_graph_of_their_own(model, kv, tmp_path):
    """Base rows of both kinds of steps equal; adapted rows equal an uncaptured step's."""
    slots = AdapterSlots(model.config, model.ops, model.ops, 3, 8)
    for slot in range(3):
        written = write_adapter(tmp_path / str(slot), model.config, rank=8, seed=slot, strength=2.0)
        slots.write(slot, read_adapter(written.folder, model.config, model.ops.dtype, 8))
    graphs = StepGraphs(model, np.arange(MAX_ROWS, dtype=np.int32), MAX_ROWS, MAX_BLOCKS)
    graphs.capture(kv, adapters=slots)
    for chunks, slots_of in (
        ([(20, 1), (0, 1), (9, 1)], [2, NO_SLOT, 0]),
        ([(3, 1), (0, 30), (64, 17)], [1, 0, NO_SLOT]),
    ):
        inputs, before = step(model, chunks), kv.copy()
        base = np.array(graphs.forward(inputs))
        rows = np.repeat(np.array(slots_of, np.int32), [length for _, length in chunks])
        logits = np.array(graphs.forward(replace(inputs, adapter_slots=rows)))
        wanted = uncaptured(model, before, inputs, BatchAdapters(slots, adapter_rows(rows, model.ops)))
        np.testing.assert_allclose(logits, wanted, atol=2e-4)
        differs = np.abs(logits - base).max(axis=1) > 1e-2
        assert differs.tolist() == [slot != NO_SLOT for slot in slots_of]
        np.testing.assert_allclose(graphs.forward(inputs), base, atol=2e-4)
