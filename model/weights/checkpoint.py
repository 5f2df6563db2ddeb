"""The weights of a model folder: which tensors there must be, where they lie, and what is wrong with one."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from model.config import ModelConfig
from model.dtypes import all_finite
from model.errors import ModelError
from model.json_files import read_json_object
from model.weights.safetensors_file import StoredTensor, read_safetensors

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
INDEX_BYTES = 64 << 20
"""Largest index that is read; a model of 400 billion parameters has a tenth of a megabyte."""

LM_HEAD = "lm_head.weight"
IGNORED_SUFFIX = "rotary_emb.inv_freq"
"""Old files store the rotary frequencies, which follow from the config."""


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor the model is made of, by its name in the files."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer_shapes(config).items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tied_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, hidden)
    return shapes


def weight_bytes(config: ModelConfig, dtype: np.dtype) -> int:
    """What all weights take in `dtype`."""
    return sum(math.prod(shape) for shape in expected_shapes(config).values()) * np.dtype(dtype).itemsize


class Checkpoint:
    """The tensors of a folder, all but their values checked."""

    def __init__(self, tensors: dict[str, StoredTensor]):
        self._tensors = tensors

    @staticmethod
    def open(directory: Path, config: ModelConfig) -> Checkpoint:
        """Read the headers of the folder's files (one, or shards with an index) and hold them against `config`.

        Raises ModelError, one line with the file and the tensor at fault.
        """
        directory = Path(directory)
        if (directory / SINGLE_FILE).exists():
            tensors = read_safetensors(directory / SINGLE_FILE)
        elif (directory / INDEX_FILE).exists():
            tensors = _read_shards(directory)
        else:
            raise ModelError(f"{directory}: neither {SINGLE_FILE} nor {INDEX_FILE} is there")
        tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(IGNORED_SUFFIX)}
        if config.tied_embeddings:
            tensors.pop(LM_HEAD, None)
        _check_names(directory, expected_shapes(config), tensors)
        return Checkpoint(tensors)

    def read_into(self, name: str, start: int, out: np.ndarray) -> None:
        """Fill contiguous `out` with the tensor's elements from `start` on, in the dtype of `out`.

        For any number of threads at once. Where the dtypes differ, the elements as they are stored take memory too.
        Raises ModelError where the file cannot be read.
        """
        tensor = self._tensors[name]
        if out.dtype == tensor.dtype:
            tensor.read_into(start, out)
            return
        values = np.empty(out.shape, tensor.dtype)
        tensor.read_into(start, values)
        with np.errstate(over="ignore", invalid="ignore"):
            out[...] = values

    def nonfinite(self, name: str, dtype: np.dtype) -> ModelError:
        """What to say of a tensor that holds NaN or infinity once it is read in `dtype`."""
        tensor = self._tensors[name]
        values = np.empty(tensor.shape, tensor.dtype)
        tensor.read_into(0, values)
        problem = f"values too large for {dtype.name}" if all_finite(values) else "NaN or infinity"
        return ModelError(f"{tensor.file}: tensor {name!r}: holds {problem}")


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, intermediate = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    projections = {
        "self_attn.q_proj": (q_size, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv_size, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv_size, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q_size, config.output_bias),
        "mlp.gate_proj": (intermediate, hidden, config.mlp_bias),
        "mlp.up_proj": (intermediate, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, intermediate, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (num_outputs, num_inputs, has_bias) in projections.items():
        shapes[f"{name}.weight"] = (num_outputs, num_inputs)
        if has_bias:
            shapes[f"{name}.bias"] = (num_outputs,)
    shapes["input_layernorm.weight"] = shapes["post_attention_layernorm.weight"] = (hidden,)
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes


def _read_shards(directory: Path) -> dict[str, StoredTensor]:
    """The tensors of all files the index names, each from the file the index says."""
    index = directory / INDEX_FILE
    file_of = read_json_object(index, INDEX_BYTES).get("weight_map")
    if not isinstance(file_of, dict) or not file_of:
        raise ModelError(f"{index}: weight_map: not an object that names files")
    for name, file_name in file_of.items():
        if not _is_plain_file_name(file_name):
            raise ModelError(f"{index}: tensor {name[:200]!r}: {str(file_name)[:200]!r} is no file of this folder")
    tensors: dict[str, StoredTensor] = {}
    for file_name in sorted(set(file_of.values())):
        for name, tensor in read_safetensors(directory / file_name).items():
            if file_of.get(name) != file_name:
                raise ModelError(f"{directory / file_name}: tensor {name[:200]!r}: not in this file by the index")
            tensors[name] = tensor
    for name, file_name in file_of.items():
        if name not in tensors:
            raise ModelError(f"{directory / file_name}: tensor {name[:200]!r}: missing, though the index names it")
    return tensors


def _is_plain_file_name(value: object) -> bool:
    return isinstance(value, str) and value.endswith(".safetensors") and not set(value) & set("/\\\0:")


def _check_names(directory: Path, shapes: dict[str, tuple[int, ...]], tensors: dict[str, StoredTensor]) -> None:
    missing = [name for name in shapes if name not in tensors]
    if missing:
        raise ModelError(f"{directory}: tensor {missing[0]!r}{_and_more(missing)}: missing")
    unexpected = sorted(set(tensors) - set(shapes))
    if unexpected:
        raise ModelError(f"{directory}: tensor {unexpected[0][:200]!r}{_and_more(unexpected)}: no part of this model")
    for name, shape in shapes.items():
        tensor = tensors[name]
        if tensor.shape != shape:
            raise ModelError(f"{tensor.file}: tensor {name!r}: shape {tensor.shape}, but config.json makes it {shape}")


def _and_more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
