"""Writer of a model folder in a compressed-tensors format, with each weight rounded to nearest."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from model.config import ModelConfig, text_config
from model.errors import ModelError
from model.json_files import read_json_object
from model.ops.fp8 import E4M3, E4M3_MAX
from model.stored_names import SINGLE_FILE
from model.weights.checkpoint import Checkpoint, expected_shapes, is_projection
from model.weights.formats.integers import pack_nibbles
from model.weights.formats.method import CONFIG_BYTES
from model.weights.safetensors_file import DTYPE_WORDS

FORMAT_NAMES = ("fp8", "int4-g128", "int4-g64", "int4-g32")

COPIED_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".md")
NOT_COPIED = ("config.json", "model.safetensors.index.json")

SCALE_DTYPE = np.dtype(ml_dtypes.bfloat16)
PIECE_ELEMENTS = 16 << 20
"""Weights in memory at once."""

INT4_HALF_RANGE = np.float32(7.5)


@dataclass(frozen=True)
class OutputTensor:
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class OutputFormat:
    name: str
    group_size: int  # 0: FP8

    def config(self, ignored: list[str]) -> dict[str, Any]:
        """Return the quantization_config of compressed-tensors, excluding the `ignored` modules."""
        common = {"symmetric": True, "dynamic": False, "actorder": None, "block_structure": None, "observer": "minmax"}
        if self.group_size:
            weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": self.group_size, **common}
            inputs, format = None, "pack-quantized"
        else:
            weights = {"num_bits": 8, "type": "float", "strategy": "channel", "group_size": None, **common}
            inputs = {**weights, "strategy": "token", "dynamic": True, "observer": None}
            format = "float-quantized"
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
        return {
            "quant_method": "compressed-tensors",
            "format": format,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ignored,
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }

    def tensors(self, module: str, shape: tuple[int, ...]) -> list[OutputTensor]:
        """Return a projection's [N, K] tensors. Raises ModelError if K is no multiple of the group."""
        num_outputs, num_inputs = shape
        if not self.group_size:
            return [
                OutputTensor(f"{module}.weight", E4M3, (num_outputs, num_inputs)),
                OutputTensor(f"{module}.weight_scale", SCALE_DTYPE, (num_outputs, 1)),
            ]
        if num_inputs % self.group_size:
            raise ModelError(f"{self.name}: {module} has {num_inputs} inputs, no multiple of {self.group_size}")
        return [
            OutputTensor(f"{module}.weight_packed", np.dtype(np.int32), (num_outputs, num_inputs // 8)),
            OutputTensor(f"{module}.weight_scale", SCALE_DTYPE, (num_outputs, num_inputs // self.group_size)),
            OutputTensor(f"{module}.weight_shape", np.dtype(np.int64), (2,)),
        ]

    def quantise(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Round float32[n, K] to (data, scale)."""
        return quantise_int4(rows, self.group_size) if self.group_size else quantise_fp8(rows)


def quantise_fp8(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Round float32[n, K] to (e4m3[n, K], bfloat16[n, 1])."""
    scale = _scales(np.abs(rows).max(axis=1, keepdims=True), E4M3_MAX)
    return np.clip(rows / scale.astype(np.float32), -E4M3_MAX, E4M3_MAX).astype(E4M3), scale


def quantise_int4(rows: np.ndarray, group_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Round float32[n, K] to (int32[n, K / 8], bfloat16[n, K / group_size])."""
    groups = rows.reshape(len(rows), -1, group_size)
    scale = _scales(np.abs(groups).max(axis=2), INT4_HALF_RANGE)
    codes = np.clip(np.rint(groups / scale.astype(np.float32)[:, :, None]), -8, 7).astype(np.int8) + 8
    packed = np.ascontiguousarray(pack_nibbles(codes.astype(np.uint8).reshape(rows.shape)))
    return packed.view("<i4"), scale


def output_format(name: str) -> OutputFormat:
    """Parse one of FORMAT_NAMES. Raises ModelError."""
    if name not in FORMAT_NAMES:
        raise ModelError(f"--format: {name!r} is not supported ({', '.join(FORMAT_NAMES)})")
    return OutputFormat(name, int(name.removeprefix("int4-g")) if name.startswith("int4-g") else 0)


def write_quantised(directory: Path, out: Path, format_name: str, on_bytes: Callable[[int], None]) -> int:
    """Write the model into the empty or new folder `out`; return its weights' bytes. Raises ModelError, OSError.

    config.json is written last: a folder without it is unfinished. `on_bytes` gets the bytes written so far.
    """
    config = ModelConfig.read(directory)
    raw = text_config(read_json_object(directory / "config.json", CONFIG_BYTES))
    checkpoint = Checkpoint.open(directory, config)
    if checkpoint.label:
        raise ModelError(f"{directory}: is quantised already ({checkpoint.label})")
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise ModelError(f"--out: {out} is not empty")
    plan = _plan(config, checkpoint, output_format(format_name))
    num_bytes = _write_file(out / SINGLE_FILE, checkpoint, plan, on_bytes)
    for path in sorted(directory.iterdir()):
        if path.suffix in COPIED_SUFFIXES and path.name not in NOT_COPIED and path.is_file():
            shutil.copyfile(path, out / path.name)
    routers = [f"re:.*\\.{re.escape(config.tensors.router)}$"] if config.experts is not None else []
    raw["quantization_config"] = plan.format.config(["lm_head", *routers])
    (out / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    return num_bytes


@dataclass(frozen=True)
class _Plan:
    format: OutputFormat
    shapes: dict[str, tuple[int, ...]]
    outputs: dict[str, list[OutputTensor]]  # by the source tensor's name


def _plan(config: ModelConfig, checkpoint: Checkpoint, format: OutputFormat) -> _Plan:
    shapes = expected_shapes(config)
    outputs = {}
    for name, shape in shapes.items():
        stored = name if config.has_head else name.removeprefix("model.")
        if is_projection(name):
            outputs[name] = format.tensors(stored.removesuffix(".weight"), shape)
        else:
            outputs[name] = [OutputTensor(stored, checkpoint.dtype(name), shape)]
    return _Plan(format, shapes, outputs)


def _write_file(path: Path, checkpoint: Checkpoint, plan: _Plan, on_bytes: Callable[[int], None]) -> int:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensors in plan.outputs.values():
        for tensor in tensors:
            begin, end = end, end + tensor.num_bytes
            entry = {"dtype": DTYPE_WORDS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
            header[tensor.name] = entry
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data_begin = 8 + len(text)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(data_begin + end)
        for name, tensors in plan.outputs.items():
            positions = [data_begin + header[tensor.name]["data_offsets"][0] for tensor in tensors]
            _write_tensor(file, checkpoint, plan, name, positions)
            on_bytes(positions[-1] + tensors[-1].num_bytes - data_begin)
    return end


def _write_tensor(file: BinaryIO, checkpoint: Checkpoint, plan: _Plan, name: str, positions: list[int]) -> None:
    shape, outputs = plan.shapes[name], plan.outputs[name]
    is_copied = not is_projection(name)
    for rows in _pieces(checkpoint, name, shape, outputs[0].dtype if is_copied else np.dtype(np.float32)):
        parts = (rows,) if is_copied else plan.format.quantise(rows)
        for index, part in enumerate(parts):
            file.seek(positions[index])
            file.write(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
            positions[index] += part.nbytes
    if len(outputs) > 2:
        file.seek(positions[2])
        file.write(np.array(shape, "<i8").tobytes())


def _pieces(checkpoint: Checkpoint, name: str, shape: tuple[int, ...], dtype: np.dtype) -> Iterator[np.ndarray]:
    width = math.prod(shape[1:])
    step = max(1, PIECE_ELEMENTS // width)
    for first in range(0, shape[0], step):
        rows = np.empty((min(step, shape[0] - first), *shape[1:]), dtype)
        checkpoint.read_into(name, first * width, rows)
        if not np.isfinite(rows.astype(np.float32, copy=False)).all():
            raise checkpoint.nonfinite(name, dtype)
        yield rows


def _scales(largest: np.ndarray, half_range: np.float32) -> np.ndarray:
    """Return bfloat16 scales; 1 for zeros."""
    scale = (largest / half_range).astype(SCALE_DTYPE)
    scale[scale == 0] = 1
    return scale
