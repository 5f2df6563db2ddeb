"""Builds a model where it computes: takes memory for the fused weights, then has all of it filled at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import Protocol

import numpy as np
from tqdm import tqdm

from model.config import ModelConfig
from model.errors import ModelError
from model.families.llama import Layer, Llama, LlamaWeights
from model.ops.interface import Array, Ops
from model.ops.weight import Weight
from model.rope import rope_tables
from model.weights.checkpoint import LM_HEAD, Checkpoint, expected_shapes, weight_bytes
from model.weights.online_fp8 import OnlineFp8, is_layer_matrix

__all__ = ["load_model", "weight_bytes"]

RANDOM_TILE = 1_000_003
"""Random numbers that dummy weights repeat. A prime, so that no two rows of a matrix are alike."""


class TensorSource(Protocol):
    """Where tensors come from, by their names in the files."""

    def read_into(self, name: str, start: int, out: np.ndarray) -> None:
        """Fill `out` [n] with the tensor's elements from `start` on, in the dtype of `out`. Raises ModelError."""

    def nonfinite(self, name: str, dtype: np.dtype) -> ModelError:
        """What to say of a tensor that turned out to hold NaN or infinity in `dtype`."""


class DummyWeights:
    """Random weights: every matrix repeats the same numbers, every norm is 1."""

    def __init__(self, config: ModelConfig, dtype: np.dtype):
        tile = np.random.default_rng(0).standard_normal(RANDOM_TILE, np.float32) * config.hidden_size**-0.5
        self._tile = tile.astype(dtype)

    def read_into(self, name: str, start: int, out: np.ndarray) -> None:
        if name.endswith("norm.weight"):
            out[:] = 1
            return
        offset = start % RANDOM_TILE
        borders = [0, *range(RANDOM_TILE - offset, out.size, RANDOM_TILE), out.size]
        for begin, end in pairwise(borders):
            first = (offset + begin) % RANDOM_TILE
            out[begin:end] = self._tile[first : first + end - begin]

    def nonfinite(self, name: str, dtype: np.dtype) -> ModelError:
        return ModelError(f"dummy weights: tensor {name!r}: not finite in {dtype.name}")


def load_model(
    directory: Path | None,
    config: ModelConfig,
    ops: Ops,
    max_model_len: int,
    *,
    load_format: str = "safetensors",
    quantization: str = "auto",
    progress: bool = False,
) -> Llama:
    """The model of `directory` in the memory and dtype of `ops`, for sequences of at most `max_model_len` tokens.

    load_format "dummy" reads no file and makes random weights. quantization "fp8" rounds the layers' matrices to e4m3
    on the device. `progress` draws a bar on stderr where that is a
    terminal: a log has lines only. Raises ModelError.
    """
    if load_format == "dummy":
        source: TensorSource = DummyWeights(config, ops.dtype)
    elif directory is None:
        raise ModelError("weights cannot be loaded without a model folder")
    else:
        source = Checkpoint.open(directory, config)
    plan = _Plan(config, ops, OnlineFp8(ops) if quantization == "fp8" else None)
    embedding = plan.tensor("model.embed_tokens.weight")
    layers = tuple(_plan_layer(plan, f"model.layers.{index}.") for index in range(config.num_layers))
    final_norm = plan.tensor("model.norm.weight")
    lm_head = Weight(embedding) if config.tied_embeddings else plan.matrix([LM_HEAD])
    plan.fill(source, progress)
    plan.check(source)
    cos, sin = rope_tables(config.rope, config.head_dim, max_model_len)
    weights = LlamaWeights(
        embedding=embedding,
        layers=layers,
        final_norm=final_norm,
        lm_head=lm_head,
        cos=ops.upload(cos),
        sin=ops.upload(sin),
    )
    return Llama(config, ops, weights)


class _Plan:
    """Memory of weights, by the names of their tensors; names that the config does not have give None."""

    def __init__(self, config: ModelConfig, ops: Ops, online: OnlineFp8 | None):
        self._online = online
        self._shapes = expected_shapes(config)
        self._ops = ops
        self._names: list[str] = []
        self._targets: list[Array] = []

    def tensor(self, name: str) -> Array:
        return self.stacked([name])

    def stacked(self, names: Sequence[str]) -> Array:
        """A single array for the tensors of one layer below one another."""
        ends = np.cumsum([self._shapes[name][0] for name in names]).tolist()
        array = self._ops.empty((ends[-1], *self._shapes[names[0]][1:]), self._ops.dtype)
        self._names += names
        self._targets += [array[begin:end] for begin, end in pairwise([0, *ends])]
        return array

    def matrix(self, names: Sequence[str]) -> Weight:
        """`stacked`, as weights of `Ops.linear`; in e4m3 if they are quantised online."""
        shapes = [self._shapes[name] for name in names]
        if self._online is not None and is_layer_matrix(names[0], shapes[0]):
            return self._online.matrix(names, shapes)
        return Weight(self.stacked(names))

    def optional(self, names: Sequence[str]) -> Array | None:
        return self.stacked(names) if names[0] in self._shapes else None

    def fill(self, source: TensorSource, progress: bool) -> None:
        num_bytes = sum(target.nbytes for target in self._targets)
        num_bytes += 0 if self._online is None else self._online.num_source_bytes
        counting = Lock()
        hidden = None if progress else True  # None: unless stderr is a terminal
        with tqdm(total=num_bytes, unit="B", unit_scale=True, desc="weights", disable=hidden) as bar:

            def read_into(name: str, start: int, out: np.ndarray) -> None:
                source.read_into(name, start, out)
                with counting:
                    bar.update(out.nbytes)

            self._ops.load_parallel(
                self._targets, lambda target, start, out: read_into(self._names[target], start, out)
            )
            if self._online is not None:
                self._online.fill(read_into, source.nonfinite)

    def check(self, source: TensorSource) -> None:
        """Where they are: there, looking at all of them costs a fraction of what it costs while they are read."""
        found = self._ops.upload(np.zeros(len(self._targets), np.int32))
        for index, target in enumerate(self._targets):
            self._ops.find_nonfinite(target, found[index : index + 1])
        for index in np.flatnonzero(self._ops.download(found)):
            raise source.nonfinite(self._names[index], self._ops.dtype)


def _plan_layer(plan: _Plan, prefix: str) -> Layer:
    def names(room: str, projections: str, kind: str) -> list[str]:
        return [f"{prefix}{room}.{letter}_proj.{kind}" for letter in projections.split()]

    return Layer(
        attention_norm=plan.tensor(f"{prefix}input_layernorm.weight"),
        qkv=plan.matrix(names("self_attn", "q k v", "weight")),
        qkv_bias=plan.optional(names("self_attn", "q k v", "bias")),
        q_norm=plan.optional([f"{prefix}self_attn.q_norm.weight"]),
        k_norm=plan.optional([f"{prefix}self_attn.k_norm.weight"]),
        output=plan.matrix(names("self_attn", "o", "weight")),
        output_bias=plan.optional(names("self_attn", "o", "bias")),
        mlp_norm=plan.tensor(f"{prefix}post_attention_layernorm.weight"),
        gate_up=plan.matrix(names("mlp", "gate up", "weight")),
        gate_up_bias=plan.optional(names("mlp", "gate up", "bias")),
        down=plan.matrix(names("mlp", "down", "weight")),
        down_bias=plan.optional(names("mlp", "down", "bias")),
    )
