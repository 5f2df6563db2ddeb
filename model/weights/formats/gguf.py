"""GGUF: tensors in llama.cpp's block formats, dequantised while read; a layer's experts are one tensor."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from model.config import ModelConfig
from model.dtypes import NUMPY_DTYPES
from model.errors import ModelError
from model.gguf_config import check_architecture
from model.gguf_file import GgufTensor, read_gguf
from model.weights.formats.stored_matrix import FLOAT32, UINT8, StoredMatrix, dense_matrix
from model.weights.safetensors_file import StoredFile, StoredTensor

FILE_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
IGNORED = "rope_freqs.weight"
_LAYER = re.compile(r"blk\.([0-9]{1,4})\.([a-z_]+)\.(weight|bias)")
_EXPERT = re.compile(r"blk\.([0-9]{1,4})\.(ffn_gate|ffn_up|ffn_down)\.([0-9]{1,4})\.weight")
"""Tensor of one expert, in files before 2024."""


@dataclass(frozen=True)
class BlockFormat:
    """`size` elements in `num_bytes`; `widen` turns uint8[n, num_bytes] into float32[n, size]."""

    name: str
    size: int
    num_bytes: int
    widen: Callable[[np.ndarray], np.ndarray]


def _halves(blocks: np.ndarray, begin: int) -> np.ndarray:
    """Return the fp16 at byte `begin` of each block, float32[n, 1]."""
    return np.ascontiguousarray(blocks[:, begin : begin + 2]).view("<f2").astype(FLOAT32)


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    values = blocks[:, 2:].view(np.int8).astype(FLOAT32)
    values *= _halves(blocks, 0)
    return values


def _q4_0(blocks: np.ndarray) -> np.ndarray:
    codes = np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], axis=1).astype(FLOAT32)
    codes -= np.float32(8)
    codes *= _halves(blocks, 0)
    return codes


def _six_bits(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Unpack uint8[n, 12] to eight scales and eight minima, float32[n, 8] each."""
    low, middle, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6) << 4], axis=1)
    minima = np.concatenate([middle & 63, (high >> 4) | (middle >> 6) << 4], axis=1)
    return scales.astype(FLOAT32), minima.astype(FLOAT32)


def _k_blocks(blocks: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Apply the scales and minima of Q4_K and Q5_K to codes uint8[n, 8, 32]."""
    scales, minima = _six_bits(blocks[:, 4:16])
    values = codes.astype(FLOAT32)
    values *= (scales * _halves(blocks, 0))[:, :, None]
    values -= (minima * _halves(blocks, 2))[:, :, None]
    return values.reshape(len(blocks), 256)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Unpack uint8[n, 128] to uint8[n, 8, 32]: 32 bytes hold 32 low, then 32 high nibbles."""
    parts = packed.reshape(len(packed), 4, 1, 32)
    return np.concatenate([parts & 15, parts >> 4], axis=2).reshape(len(packed), 8, 32)


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    return _k_blocks(blocks, _nibbles(blocks[:, 16:]))


def _q5_k(blocks: np.ndarray) -> np.ndarray:
    fifth = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    return _k_blocks(blocks, _nibbles(blocks[:, 48:]) | fifth << 4)


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    low, high = blocks[:, :128].reshape(-1, 2, 1, 64), blocks[:, 128:192].reshape(-1, 2, 1, 32)
    low = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    high = (high >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3
    codes = (low | high << 4).reshape(-1, 16, 16).astype(FLOAT32) - np.float32(32)
    scales = blocks[:, 192:208].view(np.int8).astype(FLOAT32) * _halves(blocks, 208)
    values: np.ndarray = codes * scales[:, :, None]
    return values.reshape(len(blocks), 256)


BLOCK_FORMATS = {
    2: BlockFormat("Q4_0", 32, 18, _q4_0),
    8: BlockFormat("Q8_0", 32, 34, _q8_0),
    12: BlockFormat("Q4_K", 256, 144, _q4_k),
    13: BlockFormat("Q5_K", 256, 176, _q5_k),
    14: BlockFormat("Q6_K", 256, 210, _q6_k),
}
PLAIN_TYPES = {0: NUMPY_DTYPES["float32"], 1: NUMPY_DTYPES["float16"], 30: NUMPY_DTYPES["bfloat16"]}


@dataclass(frozen=True)
class GgufWeights:
    """Tensors by their names in safetensors: vectors as stored, matrices dequantised."""

    vectors: dict[str, StoredTensor]
    matrices: dict[str, StoredMatrix]
    label: str


def read_gguf_weights(path: Path, config: ModelConfig) -> GgufWeights:
    """Read the file's headers. Raises ModelError with the tensor."""
    header = read_gguf(path)
    files = {part: _opened(part) for part in {tensor.path for tensor in header.tensors.values()}}
    pairs_rows = check_architecture(header, config.family).pairs_rows
    names = _Names(config)
    vectors: dict[str, StoredTensor] = {}
    matrices: dict[str, StoredMatrix] = {}
    formats: set[str] = set()
    for tensor in header.tensors.values():
        if tensor.name == IGNORED:
            continue
        stored = _stored(files[tensor.path], tensor)
        modules = names.modules(tensor)
        if modules is None:
            raise stored.error("no part of this model")
        if len(tensor.shape) == 1:
            if pairs_rows and modules[0].endswith(("q_proj.bias", "k_proj.bias")):
                raise stored.error("biases of interleaved rows are not supported")
            vectors[modules[0]] = stored
            continue
        if tensor.kind in BLOCK_FORMATS:
            formats.add(BLOCK_FORMATS[tensor.kind].name)
        for name, part in zip(modules, _parts(stored, tensor, len(modules)), strict=True):
            is_paired = pairs_rows and name.endswith(("q_proj.weight", "k_proj.weight"))
            matrices[name] = _matrix(name, part, tensor, config.head_dim if is_paired else 0)
    return GgufWeights(vectors, matrices, "GGUF " + (", ".join(sorted(formats)) or "16 bits"))


class _Names:
    def __init__(self, config: ModelConfig):
        tensors, experts = config.tensors, config.experts
        self._layer: dict[str, tuple[str, ...]] = {
            "attn_norm": (tensors.attention_norm,),
            "ffn_norm": (tensors.mlp_norm,),
            "attn_output": (tensors.output,),
            "attn_q_norm": (tensors.q_norm,),
            "attn_k_norm": (tensors.k_norm,),
            "ffn_down": (tensors.down,),
            **dict(zip(("attn_q", "attn_k", "attn_v"), ((name,) for name in tensors.qkv), strict=True)),
            **dict(zip(("ffn_gate", "ffn_up"), ((name,) for name in tensors.gate_up), strict=True)),
        }
        self._expert: dict[str, tuple[str, ...]] = {}
        if experts is not None:
            all_experts = [tensors.of_expert(expert) for expert in range(experts.num_experts)]
            gates, ups = zip(*(gate_up for gate_up, _ in all_experts), strict=True)
            self._expert = {"ffn_gate": gates, "ffn_up": ups, "ffn_down": tuple(down for _, down in all_experts)}
            self._layer |= {f"{kind}_exps": names for kind, names in self._expert.items()}
            self._layer["ffn_gate_up_exps"] = tuple(name for gate_up, _ in all_experts for name in gate_up)
            self._layer["ffn_gate_inp"] = (tensors.router,)

    def modules(self, tensor: GgufTensor) -> list[str] | None:
        """Return the safetensors names of the matrices stacked in a tensor; None if unknown."""
        stem, _, kind = tensor.name.rpartition(".")
        if stem in FILE_NAMES and kind == "weight":
            return [f"{FILE_NAMES[stem]}.weight"]
        if (found := _EXPERT.fullmatch(tensor.name)) is not None:
            names = self._expert.get(found[2], ())[int(found[3]) :][:1]
            return [f"model.layers.{int(found[1])}.{name}.weight" for name in names] or None
        if (found := _LAYER.fullmatch(tensor.name)) is None or found[2] not in self._layer:
            return None
        return [f"model.layers.{int(found[1])}.{name}.{found[3]}" for name in self._layer[found[2]]]


def _opened(path: Path) -> StoredFile:
    try:
        return StoredFile(path)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None


def _stored(file: StoredFile, tensor: GgufTensor) -> StoredTensor:
    where = f"{tensor.path}: tensor {tensor.name[:200]!r}"
    if tensor.kind in PLAIN_TYPES:
        dtype, shape = PLAIN_TYPES[tensor.kind], tensor.shape
    elif (block := BLOCK_FORMATS.get(tensor.kind)) is not None:
        if len(tensor.shape) < 2 or tensor.shape[-1] % block.size:
            raise ModelError(f"{where}: shape {list(tensor.shape)} is not rows of blocks of {block.size}")
        dtype, shape = UINT8[0], (*tensor.shape[:-1], tensor.shape[-1] // block.size * block.num_bytes)
    else:
        known = ", ".join(["F32", "F16", "BF16", *(each.name for each in BLOCK_FORMATS.values())])
        raise ModelError(f"{where}: type {tensor.kind} is not supported ({known})")
    if len(shape) > 3 or tensor.offset + math.prod(shape) * dtype.itemsize > tensor.file_bytes:
        raise ModelError(f"{where}: ends beyond the file, or has more than 3 dimensions")
    return StoredTensor(tensor.name, file, dtype, shape, tensor.offset)


def _parts(stored: StoredTensor, tensor: GgufTensor, count: int) -> list[StoredTensor]:
    """Return `count` stacked matrices of equal size. Raises ModelError."""
    *outer, num_rows, width = stored.shape
    num_outer = outer[0] if outer else 1
    if count % num_outer or num_outer * num_rows % count:
        raise stored.error(f"shape {list(tensor.shape)} is not that of {count} matrices")
    part = (num_outer * num_rows // count, width)
    num_bytes = math.prod(part) * stored.dtype.itemsize
    return [replace(stored, shape=part, offset=stored.offset + place * num_bytes) for place in range(count)]


def _matrix(name: str, stored: StoredTensor, tensor: GgufTensor, paired_head: int) -> StoredMatrix:
    """Return rows [N, K] of `stored`; `paired_head`: head_dim of q and k rows stored in pairs, else 0."""
    block = BLOCK_FORMATS.get(tensor.kind)
    num_rows, num_columns = stored.shape[0], tensor.shape[-1]

    def in_order(first: int, last: int) -> np.ndarray:
        rows = stored.rows(first, last)
        if block is None:
            return rows.astype(FLOAT32)
        with np.errstate(invalid="ignore", over="ignore"):
            return block.widen(rows.reshape(-1, block.num_bytes)).reshape(last - first, num_columns)

    if not paired_head or num_rows % paired_head:
        return dense_matrix(name.removesuffix(".weight"), (num_rows, num_columns), in_order)

    def in_halves(first: int, last: int) -> np.ndarray:
        """Row p * D / 2 + i of a head is row 2 i + p in the file."""
        head = paired_head
        begin, end = first // head * head, -(-last // head) * head
        pairs = in_order(begin, end).reshape(-1, head // 2, 2, num_columns)
        return pairs.swapaxes(1, 2).reshape(end - begin, num_columns)[first - begin : last - begin]

    return dense_matrix(name.removesuffix(".weight"), (num_rows, num_columns), in_halves)
