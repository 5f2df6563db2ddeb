"""The experts that a decode step reads, and the bytes of its products."""

from __future__ import annotations

from functools import partial

import numpy as np

from model.batch import Batch
from model.families.llama import Llama
from model.ops.experts import add_norm_experts
from model.ops.interface import Array, Ops
from service.engine.build import BuiltEngine
from tests.bench.step_table import PRODUCTS


def experts_in_use(built: BuiltEngine) -> float | None:
    """Return the mean number of a layer's experts that the running sequences' latest tokens take; None without experts.

    A captured step cannot be asked: its tokens are computed again, at their places in the cache.
    """
    if built.config.experts is None:
        return None
    counts: list[int] = []
    ops, model, kv = built.ops, built.executor.model, built.executor.kv
    route = ops.route_to_groups

    def counted(*routed):
        weights, groups = route(*routed)
        counts.append(int(np.count_nonzero(np.diff(ops.download(groups.offsets)))))
        return weights, groups

    own = {"route_to_groups": counted, "add_norm_experts": partial(_add_norm_experts, ops)}  # no fused kernels
    vars(ops).update(own)
    try:
        with ops.scratch():
            model.hidden(_latest_tokens(built), kv)
    finally:
        for name in own:
            del vars(ops)[name]
    return float(np.mean(counts))


def _add_norm_experts(ops: Ops, x: Array, residual: Array, weight: Array, eps: float, *how) -> Array:
    return add_norm_experts(ops, (x, residual), (weight, eps), *how)


def bytes_of_products(model: Llama, in_use: float | None) -> dict[str, int]:
    """Return the weights that a step reads, of all layers by operation: of experts those in use."""
    found: dict[str, float] = {}
    for layer in model.weights.layers:
        for name in PRODUCTS:
            weight = getattr(layer, name)
            is_stack = layer.router is not None and name in ("gate_up", "down")
            share = in_use / len(weight.data) if is_stack and in_use is not None else 1.0
            op = f"{'experts' if is_stack else 'linear'} {name}"
            found[op] = found.get(op, 0.0) + share * weight.nbytes
    return {op: round(num_bytes) for op, num_bytes in found.items()}


def _latest_tokens(built: BuiltEngine) -> Batch:
    """Return the latest computed token of each running sequence, as a step of decodes."""
    ops, block_size = built.ops, built.memory.block_size
    sequences = [sequence for sequence in built.engine.running if sequence.num_computed_tokens]
    lengths = np.array([sequence.num_computed_tokens for sequence in sequences])
    tables = np.zeros((len(sequences), max(len(sequence.block_table) for sequence in sequences)), np.int32)
    for row, sequence in zip(tables, sequences, strict=True):
        row[: len(sequence.block_table)] = np.frombuffer(sequence.block_table, np.int32)
    positions = lengths - 1
    slots = tables[np.arange(len(sequences)), positions // block_size].astype(np.int64) * block_size
    tokens = [
        sequence.token_ids[min(length, len(sequence.token_ids)) - 1]
        for sequence, length in zip(sequences, lengths.tolist(), strict=True)
    ]
    return Batch(
        token_ids=ops.upload(np.array(tokens, np.int32)),
        positions=ops.upload(positions.astype(np.int32)),
        slots=ops.upload(slots + positions % block_size),
        block_tables=ops.upload(tables),
        context_lens=ops.upload(lengths.astype(np.int32)),
        query_start=ops.upload(np.array([len(sequences)], np.int32)),
        logit_rows=None,
        num_decodes=len(sequences),
        num_tokens=len(sequences),
        num_sequences=len(sequences),
        max_query_len=0,
    )
