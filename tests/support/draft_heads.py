"""A random EAGLE-3 head, and its drafts after one step of ragged runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import numpy as np

from model.batch import StateRows
from model.config import ModelConfig
from model.families.eagle3 import Eagle3Tensors
from model.families.eagle3_config import Eagle3Config
from model.families.eagle3_device import (
    DeviceEagle3,
    DraftBatch,
    ReadRows,
    sampling_columns,
    sampling_of,
    upload_eagle3,
)
from model.ops.interface import Array, DraftPlan, DraftRuns
from model.sampler import sampling_record
from model.sampling_params import SamplingParams
from tests.support.demo_engine import DEMO

TARGET = ModelConfig.read(DEMO)
BLOCK_SIZE, NUM_BLOCKS, WIDTH = 8, 60, 12
NUM_DRAFTS = 3
RECORDS = b"".join(
    sampling_record(SamplingParams(max_tokens=9, temperature=0.7 if s % 2 else 0.0, seed=s), 0, None) for s in range(5)
)
"""Half of the sequences are greedy."""
RUNS = ((5, 3, 2), (40, 1, 0), (17, 4, 0), (63, 2, 1), (0, 1, 0))
"""Position of each run's first row, rows, right drafts."""


@dataclass
class Drafted:
    logits: list[np.ndarray]  # of each draft, float32[S, V]
    drafts: np.ndarray  # int32[K, S]
    num_accepted: np.ndarray


def random_head(
    seed: int, *, layer: Mapping[str, Any] = MappingProxyType({}), has_biases: bool = False, **changes: Any
) -> Eagle3Tensors:
    """Return a head like the demo model's, with `changes` in its config and its layer's."""
    raw = json.loads((DEMO / "eagle3" / "config.json").read_text()) | changes
    raw["transformer_layer_config"] |= layer
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(raw))
        config = Eagle3Config.read(Path(folder), TARGET)
    rng = np.random.default_rng(seed)
    shapes = config.shapes() | (config.bias_shapes() if has_biases else {})
    weights = {
        name: (1 + 0.1 * rng.standard_normal(shape) if len(shape) == 1 else rng.normal(0, shape[-1] ** -0.5, shape))
        for name, shape in shapes.items()
    }
    token_ids = np.sort(rng.permutation(TARGET.vocab_size)[: config.draft_vocab_size])
    return Eagle3Tensors(config, {name: one.astype(np.float32) for name, one in weights.items()}, token_ids, None)


def random_rows() -> tuple[np.ndarray, dict[tuple[int, int], tuple[np.ndarray, int]]]:
    """Return an embedding, and states [3 H] and the next token of each run's positions."""
    rng = np.random.default_rng(5)
    embedding = rng.standard_normal((TARGET.vocab_size, TARGET.hidden_size)).astype(np.float32)
    places = [(s, at) for s, (start, length, _) in enumerate(RUNS) for at in range(start + length)]
    states = rng.standard_normal((len(places), 3 * TARGET.hidden_size)).astype(np.float32)
    next_ids = rng.integers(0, TARGET.vocab_size, len(places)).tolist()
    return embedding, dict(zip(places, zip(states, next_ids, strict=True), strict=True))


@dataclass
class PreparedStep:
    """A step whose rows before it were read: its own, and what `DraftOps.plan_drafts` takes."""

    head: DeviceEagle3
    kv: Array
    rows: StateRows
    next_ids: np.ndarray  # int32[T], the tokens that were sampled
    runs: np.ndarray  # int32[S, 4]
    tables: np.ndarray  # int32[S, WIDTH]


def prepared_step(ops, stored: Eagle3Tensors) -> PreparedStep:
    (embedding, rows), count = random_rows(), len(RUNS)
    head = upload_eagle3(stored, ops, ops.upload(embedding.astype(ops.dtype)), WIDTH * BLOCK_SIZE)
    shape = (NUM_BLOCKS, 2, 2, TARGET.num_kv_heads, BLOCK_SIZE, TARGET.head_dim)
    kv = ops.upload(np.zeros(shape, ops.dtype))
    tables = np.random.default_rng(6).permutation(NUM_BLOCKS).reshape(count, WIDTH).astype(np.int32)
    step = [(s, at) for s, at in rows if at >= RUNS[s][0]]
    before, before_ids = _state_rows(ops, tables, {place: rows[place] for place in rows if place not in step})
    head.read(before, ops.upload(before_ids), kv, None)
    own, next_ids = _state_rows(ops, tables, {place: rows[place] for place in step})
    token_ids, first, runs = np.zeros(len(step), np.int32), 0, []
    for _, length, num_right in RUNS:
        token_ids[first + 1 : first + length] = next_ids[first : first + length - 1]
        token_ids[first + 1 + num_right : first + length] += 1
        runs.append((first, first, length, WIDTH * BLOCK_SIZE))
        first += length
    own = replace(own, token_ids=ops.upload(token_ids))
    return PreparedStep(head, kv, own, next_ids, np.array(runs, np.int32), tables)


def draft_alone(ops, stored: Eagle3Tensors, forced: np.ndarray | None = None) -> Drafted:
    """Draft after a prepared step. `forced` int32[K, S]: each draft follows these."""
    step, count, int32 = prepared_step(ops, stored), len(RUNS), np.dtype(np.int32)
    next_ids = ops.upload(step.next_ids)
    widths = TARGET.hidden_size, step.head.weights.qkv.shape[0]
    read = ReadRows(*(ops.empty((len(step.next_ids), width), ops.dtype) for width in widths))
    step.head.read(step.rows, next_ids, step.kv, read)
    plan = DraftPlan(
        *(ops.empty(shape, int32) for shape in ((count,), (count,), (NUM_DRAFTS + 2, count))),
        ops.empty((NUM_DRAFTS, count), np.dtype(np.int64)),
    )
    runs, tables = ops.upload(step.runs), ops.upload(step.tables)
    ops.plan_drafts(next_ids, (step.rows.token_ids, step.rows.positions), DraftRuns(runs, tables, BLOCK_SIZE), plan)
    out, recording = ops.empty((NUM_DRAFTS, count), int32), _Recording(ops, forced)
    hidden = ops.empty((count, TARGET.hidden_size), ops.dtype)
    drafting = DeviceEagle3(step.head.config, recording, step.head.weights)
    how = sampling_of(list(map(ops.upload, sampling_columns(RECORDS, count))), plan)
    for number in range(NUM_DRAFTS):
        drafting.draft_one(number, read, DraftBatch(plan, tables, how, hidden, out), step.kv)
    return Drafted(recording.logits, ops.download(out), ops.download(plan.num_accepted))


def _state_rows(ops, tables: np.ndarray, rows: dict) -> tuple[StateRows, np.ndarray]:
    """Return rows, and the tokens that follow, int32[T]."""
    sequences, positions = np.array(list(rows), np.int32).T
    slots = tables[sequences, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    states, next_ids = (np.array(part) for part in zip(*rows.values(), strict=True))
    next_ids = next_ids.astype(np.int32)
    hosts = (np.zeros_like(next_ids), np.ascontiguousarray(positions), slots, states.astype(ops.dtype))
    return StateRows(*map(ops.upload, hosts)), next_ids


class _Recording:
    """Operations that keep the logits they sample, and then put `forced` tokens in place of the samples."""

    def __init__(self, ops, forced: np.ndarray | None):
        self._ops, self._forced, self.logits = ops, forced, []

    def __getattr__(self, name: str):
        return getattr(self._ops, name)

    def sample(self, logits, how, out=None):
        self.logits.append(self._ops.download(logits))
        sampled = self._ops.sample(logits, how, out)
        if self._forced is not None:
            kept = np.zeros(len(logits), np.int32)
            tokens = self._ops.upload(self._forced[len(self.logits) - 1])
            self._ops.pick_tokens(out, tokens, self._ops.upload(kept + np.arange(len(logits), dtype=np.int32)))
        return sampled
