"""Draft sampling with the same noise the sampler will use at each position, from the drafter's own logits."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import numpy as np

from model.ops.cpu.sampling import perturbed
from model.ops.interface import SAMPLING_COLUMNS, Array, Ops, SamplingArrays
from model.sampler import RECORD
from service.engine.sequence import Sequence

SPAN = 6.0
"""Tokens whose logit / temperature is further below the best are not drawn."""


def drawn(
    logits: np.ndarray, sequences: Seq[Sequence], positions: Seq[int] | np.ndarray, vocabulary: np.ndarray | None = None
) -> np.ndarray:
    """Return token ids int64[S] at `positions`; logits float32[S, V] for `vocabulary` int64[V], or for 0..V-1.
    Penalties, biases and grammars are left to the sampler."""
    chosen: np.ndarray = logits.argmax(axis=1)
    records = np.frombuffer(b"".join(one.sampling_record for one in sequences), RECORD)
    rows = np.flatnonzero(records["temperature"])
    if rows.size:
        own, params = logits[rows], _arrays(records[rows], np.array(positions, np.uint32)[rows])
        least = own.max(axis=1) - np.float32(SPAN) * params.temperature
        columns = np.flatnonzero((own >= least[:, None]).any(axis=0))
        if len(columns) > 1:
            ids = columns if vocabulary is None else vocabulary[columns]
            chosen[rows] = columns[perturbed(own[:, columns], params, np.arange(rows.size), ids).argmax(axis=1)]
    return chosen if vocabulary is None else vocabulary[chosen]


def drawn_on(ops: Ops, logits: Array, sequences: Seq[Sequence], positions: Seq[int]) -> list[int]:
    """Return token ids drawn on the device of `ops`: on a GPU by the sampler, hence within top-k and top-p."""
    if ops.name == "numpy":
        return list(map(int, drawn(logits, sequences, positions)))
    records = np.frombuffer(b"".join(one.sampling_record for one in sequences), RECORD)
    params = _arrays(records, np.array(positions, np.uint32))
    sent = ops.upload_all([np.ascontiguousarray(getattr(params, name)) for name in SAMPLING_COLUMNS])
    params = replace(params, **dict(zip(SAMPLING_COLUMNS, sent, strict=True)))
    return list(map(int, ops.download(ops.sample(logits, params).token_ids)))


def _arrays(records: np.ndarray, positions: np.ndarray) -> SamplingArrays:
    columns: dict[str, Any] = {name: records[name] for name in SAMPLING_COLUMNS if name != "position"}
    return SamplingArrays(
        **columns,
        position=positions,
        penalties=None,
        bias=None,
        num_logprobs=0,
        with_logprobs=False,
    )
