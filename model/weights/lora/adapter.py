"""One LoRA adapter in PEFT's format, checked against the model and ready for a slot."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from model.config import ModelConfig
from model.dtypes import all_finite, narrow, widen
from model.errors import ModelError
from model.ops.group.arrays import Split
from model.weights.checkpoint import expected_shapes, layer_shapes
from model.weights.folding import row_orders
from model.weights.lora.config import AdapterConfig, read_adapter_config
from model.weights.safetensors_file import FLOAT_DTYPES, StoredTensor, read_safetensors
from model.weights.sharding import Sharding

TENSORS_FILE = "adapter_model.safetensors"
PICKLE_FILE = "adapter_model.bin"
PREFIX = "base_model.model."
_NAME = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_REFUSED = {
    "lora_magnitude_vector": "DoRA is not supported (plain LoRA)",
    "lora_embedding_": "adapters of embeddings are not supported (attention and MLP projections)",
    "lora_bias": "biases are not supported (plain LoRA)",
    ".lora_B.bias": "biases are not supported (plain LoRA)",
    "modules_to_save": "whole modules are not supported (plain LoRA)",
}
EXPERTS = ".experts"
"""Part of the names of experts' modules and tensors."""

SPELLINGS = ("model.language_model.", "language_model.model.")
"""Prefixes of a wrapper's layers, in place of "model."."""

READ_THREADS = 8
"""Threads that hash and convert an adapter while its requests wait."""

PIECE = 1 << 16
"""Values that are converted at once, in memory that stays in a core's cache."""

ALIGNMENT_BYTES = 64

Part = tuple[np.ndarray, np.ndarray]
"""A [r, K], B [N, r] times the scale."""


@dataclass(frozen=True)
class LoraAdapter:
    """Adapters of products, in the activations' dtype."""

    digest: str  # of everything that its outputs depend on, in hex
    rank: int  # the highest of any module
    products: Mapping[tuple[int, str], Mapping[int, Part]]  # by layer and product, then by part
    num_bytes: int


@dataclass(frozen=True)
class _Place:
    """A module: one part of a layer's stacked product."""

    layer: int
    product: str
    part: int
    shape: tuple[int, int]  # (N, K)
    row_order: np.ndarray | None  # of its outputs, where loading reorders them


@dataclass(frozen=True)
class ProductPart:
    """A module of a layer's stacked product, as a rank has it."""

    num_outputs: int
    num_inputs: int
    split: Split | None  # of its weight [N, K]: A [r, K] or B [N, r] is divided likewise


def product_parts(config: ModelConfig, layer: int, sharding: Sharding) -> dict[str, list[ProductPart]]:
    """Return the parts of each product of a layer."""
    shapes = layer_shapes(config, layer)

    def part(module: str) -> ProductPart:
        name, shape = f"model.layers.{layer}.{module}.weight", shapes[f"{module}.weight"]
        return ProductPart(*_two(sharding.part_shape(name, shape)), sharding.split(name))

    return {product: list(map(part, modules)) for product, modules in _modules(config, layer).items()}


def read_digest(directory: Path, config: ModelConfig, max_rank: int) -> str:
    """Return the digest of an adapter whose values are finite in float32: see `read_adapter`. Raises ModelError."""
    return read_adapter(directory, config, np.dtype(np.float32), max_rank).digest


def _new_bytes(count: int) -> np.ndarray:
    """NumPy asks for huge pages, which cost few page faults."""
    return np.empty(count, np.uint8)


def read_adapter(
    directory: Path,
    config: ModelConfig,
    dtype: np.dtype,
    max_rank: int,
    new_bytes: Callable[[int], np.ndarray] = _new_bytes,
) -> LoraAdapter:
    """Read and check a folder of PEFT for the model of `config`, its values in `dtype`.

    All values lie in one array, uint8[n] of `new_bytes(n)`, in a slot's order. Raises ModelError with the file and the
    field or tensor.
    """
    places = _places(config)
    path = directory / TENSORS_FILE
    if not directory.is_dir():
        raise ModelError(f"{directory}: no such folder")
    experts = {name.split(".")[-2] for name in expected_shapes(config) if EXPERTS in name}
    described = read_adapter_config(directory, tuple(places), config.num_layers, max_rank, experts)
    if not path.exists() and (directory / PICKLE_FILE).exists():
        raise ModelError(f"{directory / PICKLE_FILE}: pickles are not read (save {TENSORS_FILE})")
    tensors = read_safetensors(path)
    modules = _by_module(path, tensors, places)
    for module in described.expected:
        if module not in modules:
            raise ModelError(f"{path}: no tensors of {module}, which target_modules names")

    names = sorted(modules)
    for module in names:
        _check_part(described.rank_and_scale(module)[0], places[module].shape, modules[module])
    by_slot = [module for module in places if module in modules]
    memory = dict(zip(by_slot, _allocate([modules[module] for module in by_slot], dtype, new_bytes), strict=True))

    def read_all(some: Sequence[str]) -> list[tuple[Part, bytes]]:
        scaler = _Scaler(dtype)
        return [
            _read_part(described, module, places[module], modules[module], memory[module], scaler) for module in some
        ]

    digest = hashlib.sha256(described.key.encode())
    products: dict[tuple[int, str], dict[int, Part]] = {}
    num_bytes = rank = 0
    shares = [names[thread::READ_THREADS] for thread in range(READ_THREADS)]
    with ThreadPoolExecutor(READ_THREADS) as pool:
        read_parts = {
            module: part
            for share, parts in zip(shares, pool.map(read_all, shares), strict=True)
            for module, part in zip(share, parts, strict=True)
        }
    for module in names:
        (part, part_digest), place = read_parts[module], places[module]
        digest.update(part_digest)
        products.setdefault((place.layer, place.product), {})[place.part] = part
        rank = max(rank, len(part[0]))
        num_bytes += sum(array.nbytes for array in part)
    return LoraAdapter(digest.hexdigest(), rank, products, num_bytes)


def _read_part(
    described: AdapterConfig,
    module: str,
    place: _Place,
    pair: tuple[StoredTensor, StoredTensor],
    memory: Part,
    scaler: _Scaler,
) -> tuple[Part, bytes]:
    """Read a module's part into `memory`; return it, and the digest of what it depends on."""
    rank, scale = described.rank_and_scale(module)
    digest = hashlib.sha256(f"{module} {rank} {scale!r}".encode())
    for tensor, values, factor in zip(pair, memory, (1.0, scale), strict=True):
        stored = values if tensor.dtype == values.dtype else np.empty(tensor.shape, tensor.dtype)
        tensor.read_into(0, stored)
        digest.update(stored.reshape(-1).view(np.uint8).data)
        if not scaler.scale(stored, factor, values):
            raise tensor.error(f"NaN or infinity in {scaler.dtype.name}")
    if place.row_order is not None:
        memory[1][:] = memory[1][place.row_order]
    return memory, digest.digest()


class _Scaler:
    """Multiplies arrays and casts them to `dtype`, for one thread."""

    def __init__(self, dtype: np.dtype):
        self.dtype = dtype
        self._memory = np.empty((2, PIECE), np.float32)

    def scale(self, stored: np.ndarray, factor: float, out: np.ndarray) -> bool:
        """Write values times a factor to `out`, rounded once; it may be `stored`. Return whether all are finite."""
        if not all_finite(stored):
            return False
        if factor == 1 and out is stored:
            return True
        values, results = stored.reshape(-1), out.reshape(-1)
        with np.errstate(over="ignore"):
            for start in range(0, values.size, PIECE):
                piece = values[start : start + PIECE]
                wide, rest = self._memory[:, : piece.size]
                widen(piece, wide)
                wide *= np.float32(factor)
                narrow(wide, results[start : start + PIECE], rest)
        return all_finite(out)


def adapter_bytes(config: ModelConfig, dtype: np.dtype, max_rank: int) -> int:
    """Return the most bytes that `read_adapter` asks of `new_bytes`."""
    sizes = [max_rank * width * dtype.itemsize for place in _places(config).values() for width in place.shape]
    return sum(map(_aligned, sizes))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _check_part(rank: int, shape: tuple[int, int], pair: tuple[StoredTensor, StoredTensor]) -> None:
    """Raise ModelError unless A is [r, K] and B [N, r], of floats."""
    (num_outputs, num_inputs), (a, b) = shape, pair
    for tensor, expected in ((a, (rank, num_inputs)), (b, (num_outputs, rank))):
        if tensor.dtype not in FLOAT_DTYPES.values():
            raise tensor.error(f"dtype {tensor.dtype.name} is not supported ({', '.join(FLOAT_DTYPES)})")
        if tensor.shape != expected:
            raise tensor.error(f"shape {list(tensor.shape)} is not {list(expected)} (rank, inputs and outputs)")


def _allocate(
    pairs: Sequence[tuple[StoredTensor, StoredTensor]], dtype: np.dtype, new_bytes: Callable[[int], np.ndarray]
) -> Iterator[Part]:
    """Yield arrays of the tensors' shapes, all in one."""
    tensors = [tensor for pair in pairs for tensor in pair]
    sizes = [math.prod(tensor.shape) * dtype.itemsize for tensor in tensors]
    ends = list(accumulate(map(_aligned, sizes)))
    memory = new_bytes(ends[-1])
    arrays = (
        memory[begin : begin + size].view(dtype).reshape(tensor.shape)
        for tensor, size, begin in zip(tensors, sizes, [0, *ends], strict=False)
    )
    yield from zip(arrays, arrays, strict=True)


def _by_module(
    path: Path, tensors: Mapping[str, StoredTensor], places: Mapping[str, _Place]
) -> dict[str, tuple[StoredTensor, StoredTensor]]:
    sides: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        module, side = _parsed(tensor, name)
        if module not in places and EXPERTS in module:
            raise tensor.error("adapters of experts are not supported (attention and dense layers)")
        if module not in places:
            known = ", ".join(dict.fromkeys(one.rpartition(".")[2] for one in places))
            raise tensor.error(f"the model has no such module to adapt ({known})")
        sides.setdefault(module, {})[side] = tensor
    if not sides:
        raise ModelError(f"{path}: no tensors")
    pairs = {}
    for module, both in sides.items():
        if len(both) < 2:
            [(side, tensor)] = both.items()
            raise tensor.error(f"lora_{'B' if side == 'A' else 'A'} of this module is missing")
        pairs[module] = both["A"], both["B"]
    return pairs


def _parsed(tensor: StoredTensor, name: str) -> tuple[str, str]:
    """Return (module of the model, "A" or "B")."""
    for mark, problem in _REFUSED.items():
        if mark in name:
            raise tensor.error(problem)
    match = _NAME.fullmatch(name.removeprefix(PREFIX))
    if not name.startswith(PREFIX) or match is None:
        raise tensor.error(f"not a LoRA tensor ({PREFIX}MODULE.lora_A.weight, .lora_B.weight)")
    module = match["module"]
    for spelling in SPELLINGS:
        if module.startswith(spelling):
            module = "model." + module.removeprefix(spelling)
    return module, match["side"]


def _places(config: ModelConfig) -> dict[str, _Place]:
    """Return every module that an adapter may change, by its plain name: no experts, no router."""
    shapes, orders = expected_shapes(config), row_orders(config)
    places = {}
    for layer in range(config.num_layers):
        for product, modules in _modules(config, layer).items():
            for part, module in enumerate(modules):
                name = f"model.layers.{layer}.{module}"
                places[name] = _Place(layer, product, part, _two(shapes[f"{name}.weight"]), orders.get(module))
    return places


def _modules(config: ModelConfig, layer: int) -> dict[str, tuple[str, ...]]:
    """Return the modules of each product; experts have none."""
    tensors = config.tensors
    attention = {"qkv": tensors.qkv, "output": (tensors.output,)}
    return (
        attention if config.has_experts(layer) else {**attention, "gate_up": tensors.gate_up, "down": (tensors.down,)}
    )


def _two(shape: tuple[int, ...]) -> tuple[int, int]:
    num_outputs, num_inputs = shape
    return num_outputs, num_inputs
