"""Builds a model where it computes: each layer's tensors read, checked, converted, fused and uploaded in turn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from tqdm import tqdm

from model.config import ModelConfig
from model.errors import ModelError
from model.llama import Layer, Llama, LlamaWeights
from model.ops.interface import Array, Ops
from model.rope import rope_tables
from model.weights import LM_HEAD, Checkpoint, expected_shapes, weight_bytes

__all__ = ["load_model", "weight_bytes"]

RANDOM_TILE = 1_000_003
"""Random numbers that dummy weights repeat. A prime, so that no two rows of a matrix are alike."""


class TensorSource(Protocol):
    """Where tensors come from, by their names in the files."""

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        """The tensor in `dtype`; a view where that is possible. Raises ModelError."""


class DummyWeights:
    """Random weights of a config's shapes: slices of one host array, so that uploading them is what takes the time."""

    def __init__(self, config: ModelConfig, dtype: np.dtype):
        self._shapes = expected_shapes(config)
        tile = np.random.default_rng(0).standard_normal(RANDOM_TILE, np.float32) * config.hidden_size**-0.5
        self._values = np.resize(tile.astype(dtype), max(math.prod(shape) for shape in self._shapes.values()))

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        shape = self._shapes[name]
        if name.endswith("norm.weight"):
            return np.ones(shape, dtype)
        return self._values[: math.prod(shape)].reshape(shape)


def load_model(
    directory: Path | None,
    config: ModelConfig,
    ops: Ops,
    max_model_len: int,
    *,
    load_format: str = "safetensors",
    progress: bool = False,
) -> Llama:
    """The model of `directory` in the memory and dtype of `ops`, for sequences of at most `max_model_len` tokens.

    load_format "dummy" reads no file and makes random weights. `progress` draws a bar on stderr. Raises ModelError.
    """
    if load_format == "dummy":
        source: TensorSource = DummyWeights(config, ops.dtype)
    elif directory is None:
        raise ModelError("weights cannot be loaded without a model folder")
    else:
        source = Checkpoint.open(directory, config)
    with tqdm(
        total=weight_bytes(config, ops.dtype), unit="B", unit_scale=True, desc="weights", disable=not progress
    ) as bar:
        upload = _Uploader(source, config, ops, bar)
        embedding = upload.tensor("model.embed_tokens.weight")
        layers = tuple(_load_layer(upload, f"model.layers.{index}.") for index in range(config.num_layers))
        final_norm = upload.tensor("model.norm.weight")
        lm_head = embedding if config.tied_embeddings else upload.tensor(LM_HEAD)
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


class _Uploader:
    """Tensors by name from their source to the backend; names that the config does not have give None."""

    def __init__(self, source: TensorSource, config: ModelConfig, ops: Ops, bar: tqdm):
        self._source = source
        self._names = expected_shapes(config).keys()
        self._ops = ops
        self._bar = bar

    def tensor(self, name: str) -> Array:
        return self.stacked([name])

    def stacked(self, names: Sequence[str]) -> Array:
        """The tensors of one layer below one another, as a single matrix."""
        parts = [self._source.read(name, self._ops.dtype) for name in names]
        array = self._ops.upload(parts[0] if len(parts) == 1 else np.concatenate(parts))
        self._bar.update(array.nbytes)
        return array

    def optional(self, names: Sequence[str]) -> Array | None:
        return self.stacked(names) if names[0] in self._names else None


def _load_layer(upload: _Uploader, prefix: str) -> Layer:
    def names(room: str, projections: str, kind: str) -> list[str]:
        return [f"{prefix}{room}.{letter}_proj.{kind}" for letter in projections.split()]

    return Layer(
        attention_norm=upload.tensor(f"{prefix}input_layernorm.weight"),
        qkv=upload.stacked(names("self_attn", "q k v", "weight")),
        qkv_bias=upload.optional(names("self_attn", "q k v", "bias")),
        q_norm=upload.optional([f"{prefix}self_attn.q_norm.weight"]),
        k_norm=upload.optional([f"{prefix}self_attn.k_norm.weight"]),
        output=upload.stacked(names("self_attn", "o", "weight")),
        output_bias=upload.optional(names("self_attn", "o", "bias")),
        mlp_norm=upload.tensor(f"{prefix}post_attention_layernorm.weight"),
        gate_up=upload.stacked(names("mlp", "gate up", "weight")),
        gate_up_bias=upload.optional(names("mlp", "gate up", "bias")),
        down=upload.stacked(names("mlp", "down", "weight")),
        down_bias=upload.optional(names("mlp", "down", "bias")),
    )
