"""LoRA adapter in PEFT's format, checked against the model and ready for a slot."""

from __future__ import annotations

import functools
import hashlib
import math
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np

from model.config import ModelConfig
from model.errors import ModelError
from model.weights.checkpoint import expected_shapes
from model.weights.folding import row_orders
from model.weights.lora.config import EXPERTS_ARE_OFF, AdapterConfig, read_adapter_config
from model.weights.lora.experts import ExpertReader, ExpertSource, find_experts, parameter_names
from model.weights.lora.modules import PlannedModule, PlannedTensor, read_modules
from model.weights.lora.products import ROUTER, STACK_NAMES, Part, modules_of, two
from model.weights.lora.scaler import Scaler
from model.weights.safetensors_file import FLOAT_DTYPES, StoredFile, StoredTensor, read_safetensors

TENSORS_FILE = "adapter_model.safetensors"
PICKLE_FILE = "adapter_model.bin"
PREFIX = "base_model.model."
_NAME = re.compile(rf"{re.escape(PREFIX)}(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_REFUSED = {
    "lora_magnitude_vector": "DoRA is not supported (plain LoRA)",
    "lora_embedding_": "adapters of embeddings are not supported (attention and MLP projections)",
    "lora_bias": "biases are not supported (plain LoRA)",
    ".lora_B.bias": "biases are not supported (plain LoRA)",
    "modules_to_save": "whole modules are not supported (plain LoRA)",
}
EXPERTS = ".experts"
"""Part of the names of experts' modules and tensors."""

ROUTER_MODULE = "mlp.gate"
"""Router name of every family in transformers 5."""

_FLOATS = frozenset(FLOAT_DTYPES.values())
_OF_EXPERTS = re.compile(r"\.experts(\.|$)|\.gate$")

SPELLINGS = ("model.language_model.", "language_model.model.")
"""Prefixes of a wrapper's layers, in place of "model."."""

READ_THREADS = min(8, len(os.sched_getaffinity(0)))
"""Threads that hash and convert an adapter while its requests wait; more threads than cores would wait for each
other."""

ALIGNMENT_BYTES = 64

Source = TypeVar("Source")
Result = TypeVar("Result")


@dataclass(frozen=True)
class LoraAdapter:
    """Adapters of products, in the activations' dtype."""

    digest: str  # of everything its outputs depend on, in hex
    rank: int  # highest of any module
    products: Mapping[tuple[int, str], Mapping[int, Part]]  # by layer and product, then by part; [E, ...] for experts
    num_bytes: int
    memory: np.ndarray | None = None  # uint8[n] behind all arrays
    layout: str | None = None  # equal for adapters with the same array offsets in their memories


@dataclass(frozen=True)
class _Place:
    """Module: one part of a layer's stacked product."""

    layer: int
    product: str
    part: int
    shape: tuple[int, int]  # (N, K)
    row_order: np.ndarray | None  # order of its outputs, where loading reorders them


class OtherReaders(Protocol):
    """Processes that read modules of one adapter to the same memory, by `read_modules`."""

    @property
    def count(self) -> int: ...

    def start(self, path: Path, shares: Sequence[Sequence[PlannedModule]]) -> None:
        """Start each process on a share of a file's modules."""

    def digests(self) -> Sequence[Sequence[bytes]]:
        """Wait for the processes; return each share's digests, in order. Raises ModelError."""


def adapts_experts(directory: Path) -> bool:
    """Return True if tensor names show adapted experts or routers. Raises ModelError."""
    return any(_OF_EXPERTS.search(name.partition(".lora_")[0]) for name in read_safetensors(directory / TENSORS_FILE))


def read_digest(directory: Path, config: ModelConfig, max_rank: int, *, with_experts: bool = False) -> str:
    """Return the digest of an adapter with values finite in float32; see `read_adapter`. Raises ModelError."""
    arguments = directory, config, np.dtype(np.float32), max_rank, _new_bytes
    return _read(*arguments, with_experts=with_experts, keeps_experts=False).digest


def _new_bytes(count: int) -> np.ndarray:
    """Allocate memory. NumPy asks for huge pages, which means few page faults."""
    return np.empty(count, np.uint8)


def read_adapter(
    directory: Path,
    config: ModelConfig,
    dtype: np.dtype,
    max_rank: int,
    new_bytes: Callable[[int], np.ndarray] = _new_bytes,
    *,
    with_experts: bool = False,
    others: OtherReaders | None = None,
) -> LoraAdapter:
    """Read and check a PEFT folder for the model of `config`, with values in `dtype`.

    All values are in one array, uint8[n] from `new_bytes(n)`, in a slot's order, then experts'. `others` read shares of
    the modules to the same memory meanwhile. Raises ModelError with the file and the field or tensor, also for experts
    and routers unless `with_experts`.
    """
    return _read(directory, config, dtype, max_rank, new_bytes, with_experts=with_experts, others=others)


@dataclass(frozen=True)
class _PlannedAdapter:
    """Checked adapter whose values are not read yet."""

    described: AdapterConfig
    dtype: np.dtype
    file: StoredFile
    modules: Sequence[PlannedModule]  # without experts, sorted by name
    memory: np.ndarray  # uint8[n]
    sources: Sequence[tuple[ExpertSource, np.ndarray | None]]  # of experts, with memory
    expert_reader: ExpertReader

    def read_modules(self, modules: Sequence[PlannedModule]) -> list[bytes]:
        """Fill modules' memory; return their digests. Raises ModelError."""
        return read_modules(self.file, modules, self.memory, self.dtype)

    def read_experts(
        self, some: Sequence[tuple[ExpertSource, np.ndarray | None]]
    ) -> list[tuple[dict[int, Part], bytes]]:
        scaler = Scaler(self.dtype)
        return [self.expert_reader.read(source, own, scaler) for source, own in some]


def _read(
    directory: Path,
    config: ModelConfig,
    dtype: np.dtype,
    max_rank: int,
    new_bytes: Callable[[int], np.ndarray],
    *,
    with_experts: bool,
    keeps_experts: bool = True,
    others: OtherReaders | None = None,
) -> LoraAdapter:
    how = {"with_experts": with_experts, "keeps_experts": keeps_experts}
    planned = _plan(directory, config, dtype, max_rank, new_bytes, **how)
    modules = planned.modules
    with ThreadPoolExecutor(READ_THREADS) as pool:
        if others is None:
            part_digests = _read_shares(pool, planned.read_modules, modules)
        else:
            own, *shares = (modules[number :: 1 + others.count] for number in range(1 + others.count))
            others.start(directory / TENSORS_FILE, shares)
            part_digests = _in_turn([planned.read_modules(own), *others.digests()], len(modules))
        read_stacks = _read_shares(pool, planned.read_experts, planned.sources)
    digest, places = hashlib.sha256(planned.described.key.encode()), _places(config, with_experts)
    products: dict[tuple[int, str], dict[int, Part]] = {}
    for module, part_digest in zip(modules, part_digests, strict=True):
        place = places[module.name]
        digest.update(part_digest)
        products.setdefault((place.layer, place.product), {})[place.part] = module.part(planned.memory, dtype)
    for (source, _), (parts, part_digest) in zip(planned.sources, read_stacks, strict=True):
        digest.update(part_digest)
        products.setdefault((source.layer, source.product), {}).update(parts)
    every = [part for parts in products.values() for part in parts.values()]
    num_bytes = sum(array.nbytes for part in every for array in part)
    return LoraAdapter(digest.hexdigest(), max((a.shape[-2] for a, _ in every), default=0), products, num_bytes)


def _plan(
    directory: Path,
    config: ModelConfig,
    dtype: np.dtype,
    max_rank: int,
    new_bytes: Callable[[int], np.ndarray],
    *,
    with_experts: bool,
    keeps_experts: bool = True,
) -> _PlannedAdapter:
    """Check all but an adapter's values, and allocate their memory. Raises ModelError."""
    places = _places(config, with_experts)
    path = directory / TENSORS_FILE
    if not directory.is_dir():
        raise ModelError(f"{directory}: no such folder")
    described = _read_config(directory, config, max_rank, with_experts)
    if not path.exists() and (directory / PICKLE_FILE).exists():
        raise ModelError(f"{directory / PICKLE_FILE}: pickles are not read (save {TENSORS_FILE})")
    tensors = read_safetensors(path)
    pairs = _by_module(path, tensors, places, config, with_experts)
    sources = find_experts(config, {name: pair for name, pair in pairs.items() if name not in places})
    _check_expected(path, described, pairs, sources, places)
    reader = ExpertReader(config, described, dtype, max_rank)
    by_slot = [name for name in places if name in pairs]
    sizes = [math.prod(tensor.shape) for name in by_slot for tensor in pairs[name]]
    sizes += [reader.num_values(source) for source in sources if keeps_experts]
    *begins, num_bytes = accumulate((_aligned(size * dtype.itemsize) for size in sizes), initial=0)
    memory = new_bytes(max(1, num_bytes))
    modules = [
        _planned(described, name, places[name], pairs[name], (begins[2 * number], begins[2 * number + 1]))
        for number, name in enumerate(by_slot)
    ]
    of_sources: list[np.ndarray | None] = [None] * len(sources)
    if keeps_experts:
        spans = list(zip(begins, sizes, strict=True))[2 * len(by_slot) :]
        of_sources = [memory[begin : begin + size * dtype.itemsize].view(dtype) for begin, size in spans]
    file = next(iter(tensors.values())).file
    with_memory = list(zip(sources, of_sources, strict=True))
    return _PlannedAdapter(described, dtype, file, sorted(modules), memory, with_memory, reader)


def _planned(
    described: AdapterConfig,
    name: str,
    place: _Place,
    pair: tuple[StoredTensor, StoredTensor],
    begins: tuple[int, int],
) -> PlannedModule:
    """Plan a module. Raises ModelError unless A is [r, K] and B [N, r], in floats."""
    rank, scale = described.rank_and_scale(name)
    (num_outputs, num_inputs), (a, b) = place.shape, pair
    for tensor, expected in ((a, (rank, num_inputs)), (b, (num_outputs, rank))):
        if tensor.dtype not in _FLOATS:
            raise tensor.error(f"dtype {tensor.dtype.name} is not supported ({', '.join(FLOAT_DTYPES)})")
        if tensor.shape != expected:
            raise tensor.error(f"shape {list(tensor.shape)} is not {list(expected)} (rank, inputs and outputs)")
    planned_a, planned_b = (
        PlannedTensor(tensor.name, tensor.dtype, tensor.shape, tensor.offset, begin)
        for tensor, begin in zip(pair, begins, strict=True)
    )
    return PlannedModule(name, rank, scale, planned_a, planned_b, place.row_order)


def _read_shares(
    pool: ThreadPoolExecutor, read: Callable[[Sequence[Source]], Sequence[Result]], sources: Sequence[Source]
) -> list[Result]:
    """Read shares on READ_THREADS threads; return results in the order of `sources`."""
    shares = list(pool.map(read, [sources[thread::READ_THREADS] for thread in range(READ_THREADS)]))
    return _in_turn(shares, len(sources))


def _in_turn(shares: Sequence[Sequence[Result]], count: int) -> list[Result]:
    """Interleave: the first of each share, then the second of each."""
    return [shares[number % len(shares)][number // len(shares)] for number in range(count)]


def _read_config(directory: Path, config: ModelConfig, max_rank: int, with_experts: bool) -> AdapterConfig:
    modules, experts, parameters = _adaptable(config, with_experts)
    return read_adapter_config(directory, modules, config.num_layers, max_rank, experts, parameters)


@functools.cache
def _adaptable(
    config: ModelConfig, with_experts: bool
) -> tuple[tuple[str, ...], frozenset[str], tuple[str, ...] | None]:
    """Return the names an adapter's config may use: modules, endings of experts and routers, parameters."""
    modules = tuple(name for name, place in _places(config, with_experts).items() if place.product != ROUTER)
    experts = {name.split(".")[-2] for name in expected_shapes(config) if EXPERTS in name}
    if config.experts is not None:
        experts.add(config.tensors.router.rpartition(".")[2])
    is_off = config.experts is not None and not with_experts
    return modules, frozenset(experts), None if is_off else tuple(parameter_names(config))


def _check_expected(
    path: Path,
    described: AdapterConfig,
    modules: Collection[str],
    sources: Sequence[ExpertSource],
    places: Mapping[str, _Place],
) -> None:
    """Raise ModelError unless all modules and parameters named by the config have tensors."""
    for module in described.expected:
        if module not in modules:
            raise ModelError(f"{path}: no tensors of {module}, which target_modules names")
    adapted = {(source.layer, STACK_NAMES[source.product]) for source in sources}
    adapted |= {(places[name].layer, "weight") for name in modules if name in places and places[name].product == ROUTER}
    for name in described.parameters:
        if (int(name.split(".")[2]), name.rpartition(".")[2]) not in adapted:
            raise ModelError(f"{path}: no tensors of {name}, which target_parameters names")


def adapter_bytes(config: ModelConfig, dtype: np.dtype, max_rank: int, *, with_experts: bool = False) -> int:
    """Return the maximum bytes `read_adapter` requests from `new_bytes`."""
    places = _places(config, with_experts)
    widths = [width for place in places.values() for width in place.shape]
    if with_experts and config.experts is not None:
        of_all = config.experts.num_experts * (config.hidden_size + config.experts.intermediate_size)
        widths += [of_all] * 3 * sum(map(config.has_experts, range(config.num_layers)))
    return sum(_aligned(max_rank * width * dtype.itemsize) for width in widths)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _by_module(
    path: Path,
    tensors: Mapping[str, StoredTensor],
    places: Mapping[str, _Place],
    config: ModelConfig,
    with_experts: bool,
) -> dict[str, tuple[StoredTensor, StoredTensor]]:
    sides: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        module, side = _parsed(tensor, name)
        is_of_experts = config.experts is not None and _OF_EXPERTS.search(module) is not None
        if module not in places and is_of_experts and not with_experts:
            raise tensor.error(EXPERTS_ARE_OFF)
        if module not in places and not (is_of_experts and EXPERTS in module):
            known = ", ".join(dict.fromkeys(one.rpartition(".")[2] for one in places))
            raise tensor.error(f"the model has no such module to adapt ({known})")
        if sides.setdefault(module, {}).setdefault(side, tensor) is not tensor:
            raise tensor.error(f"{module} has two such tensors, by different names")
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
    match = _NAME.fullmatch(name)
    if match is None:
        problems = [problem for mark, problem in _REFUSED.items() if mark in name]
        raise tensor.error((*problems, f"not a LoRA tensor ({PREFIX}MODULE.lora_A.weight, .lora_B.weight)")[0])
    module = match["module"]
    for spelling in SPELLINGS:
        if module.startswith(spelling):
            module = "model." + module.removeprefix(spelling)
    return module, match["side"]


@functools.cache
def _places(config: ModelConfig, with_router: bool) -> dict[str, _Place]:
    """Return every module an adapter may change, by plain name, without experts."""
    shapes, orders = expected_shapes(config), row_orders(config)
    places = {}
    for layer in range(config.num_layers):
        for product, modules in modules_of(config, layer, with_router).items():
            for part, module in enumerate(modules):
                name = f"model.layers.{layer}.{module}"
                places[name] = _Place(layer, product, part, two(shapes[f"{name}.weight"]), orders.get(module))
                if product == ROUTER:
                    places[f"model.layers.{layer}.{ROUTER_MODULE}"] = places[name]
    return places
