"""Adapters of experts: tensors per expert module, or of a layer's stacks (PEFT's `target_parameters`)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from model.config import ModelConfig
from model.errors import ModelError
from model.weights.lora.config import AdapterConfig
from model.weights.lora.products import DOWN, GATE_UP, STACK_NAMES, Part
from model.weights.lora.scaler import Scaler
from model.weights.safetensors_file import FLOAT_DTYPES, StoredTensor

_MODULE = re.compile(
    r"(?P<experts>model\.layers\.(?P<layer>[0-9]{1,6})\.(?:mlp|block_sparse_moe)\.experts)"
    r"(?:\.(?P<expert>[0-9]{1,6})\.(?P<name>\w+)|(?:\.base_layer)*)"
)

Pair = tuple[StoredTensor, StoredTensor]
"""A and B of a module."""


@dataclass(frozen=True)
class ExpertTensors:
    """Part of a layer's product: a pair for each of some experts."""

    layer: int
    product: str
    part: int
    modules: Mapping[int, tuple[str, Pair]]  # by expert


@dataclass(frozen=True)
class ExpertStack:
    """All parts of a layer's product: A [E r, K] with an expert's rows adjacent, B [N, r E] with an expert's columns E
    apart.

    PEFT before 0.19.1 stores the transposed product: A [E r, N], B [K, r E]. Shapes show it, unless all are square.
    """

    layer: int
    product: str
    name: str  # of the parameter
    pair: Pair
    is_transposed: bool


ExpertSource = ExpertTensors | ExpertStack


def find_experts(config: ModelConfig, pairs: Mapping[str, Pair]) -> list[ExpertSource]:
    """Return the adapted products of `pairs`, all of experts, by layer. Raises ModelError with the tensor."""
    if not pairs:
        return []
    stacks: dict[tuple[int, str], ExpertStack] = {}
    are_transposed = _are_transposed(config, [pair for module, pair in pairs.items() if _is_stack(module)])
    modules: dict[tuple[int, str, int], dict[int, tuple[str, Pair]]] = {}
    for module, pair in pairs.items():
        match = _MODULE.fullmatch(module)
        layer = -1 if match is None else int(match["layer"])
        if match is None or not (0 <= layer < config.num_layers and config.has_experts(layer)):
            raise pair[0].error("the model has no such experts to adapt")
        if match["expert"] is None:
            stack = _stack(config, layer, match["experts"], pair, are_transposed)
            if stacks.setdefault((layer, stack.product), stack) is not stack:
                raise pair[0].error(f"{STACK_NAMES[stack.product]} of this layer is adapted twice")
            continue
        product, part = _part_of(config, match["name"], int(match["expert"]), pair)
        modules.setdefault((layer, product, part), {})[int(match["expert"])] = module, pair
    for layer, product, _ in modules:
        if (layer, product) in stacks:
            raise stacks[layer, product].pair[0].error("this layer's experts are adapted one by one as well")
    found: list[ExpertSource] = [ExpertTensors(*key, dict(sorted(own.items()))) for key, own in sorted(modules.items())]
    return found + [stack for _, stack in sorted(stacks.items())]


def parameter_names(config: ModelConfig) -> Iterator[str]:
    """Yield the names `target_parameters` may end in: stacks of experts and routers."""
    blocks = {"mlp", config.tensors.experts.rpartition(".")[0]}
    for layer in range(config.num_layers):
        if config.has_experts(layer):
            for block in sorted(blocks):
                for name in (*(f"experts.{stack}" for stack in STACK_NAMES.values()), "gate.weight"):
                    yield f"model.layers.{layer}.{block}.{name}"


class ExpertReader:
    """Reader of `find_experts` results. Callable from any thread."""

    def __init__(self, config: ModelConfig, described: AdapterConfig, dtype: np.dtype, max_rank: int):
        self._num_experts, self._size = (0, 0) if config.experts is None else _sizes(config)
        self._hidden = config.hidden_size
        self._described = described
        self._dtype = dtype
        self._max_rank = max_rank

    def num_values(self, source: ExpertSource) -> int:
        """Return the maximum values of the parts, with ranks up to the highest allowed."""
        first = source.name if isinstance(source, ExpertStack) else next(iter(source.modules.values()))[0]
        rank, hidden, size = self._described.rank_and_scale(first)[0], self._hidden, self._size
        num_parts = 2 if isinstance(source, ExpertStack) and source.product == GATE_UP else 1
        return self._num_experts * min(rank, self._max_rank) * (hidden + size) * num_parts

    def read(self, source: ExpertSource, memory: np.ndarray | None, scaler: Scaler) -> tuple[dict[int, Part], bytes]:
        """Return A [E, r, K] and B [E, N, r] of each part, and their digest. Raises ModelError.

        The parts are in `memory` [num_values]; with None, none are returned.
        """
        if isinstance(source, ExpertStack):
            parts, digest = self._read_stack(source, scaler)
        else:
            parts, digest = self._read_each(source, scaler)
        return {} if memory is None else dict(_placed(parts, memory)), digest

    def _read_each(self, source: ExpertTensors, scaler: Scaler) -> tuple[dict[int, Part], bytes]:
        """Read tensors per expert; experts without tensors get zeros."""
        (first, pair), described = next(iter(source.modules.values())), self._described
        rank, scale = described.rank_and_scale(first)
        self._check_rank(rank, pair)
        num_outputs, num_inputs = (self._hidden, self._size) if source.product == DOWN else (self._size, self._hidden)
        shapes = (rank, num_inputs), (num_outputs, rank)
        stored = [
            np.zeros((self._num_experts, *shape), tensor.dtype) for shape, tensor in zip(shapes, pair, strict=True)
        ]
        for expert, (module, own) in source.modules.items():
            if described.rank_and_scale(module) != (rank, scale):
                raise own[0].error(f"rank or scale differ from {first}'s (the same for all experts)")
            for tensor, shape, values in zip(own, shapes, stored, strict=True):
                _check(tensor, shape)
                if tensor.dtype != values.dtype:
                    raise tensor.error(f"dtype {tensor.dtype.name} differs from other experts' ({values.dtype.name})")
                tensor.read_into(0, values[expert])
        key = f"{source.layer} {source.product} {source.part} {rank} {scale!r}"
        a, b, digest = self._scaled(key, pair, stored, scale, scaler)
        return {source.part: (a, b)}, digest

    def _read_stack(self, source: ExpertStack, scaler: Scaler) -> tuple[dict[int, Part], bytes]:
        rank, scale = self._described.rank_and_scale(source.name)
        num_experts, (tensor_a, tensor_b) = self._num_experts, source.pair
        _check(tensor_a, (num_experts * rank, tensor_a.shape[1]))
        _check(tensor_b, (tensor_b.shape[0], num_experts * rank))
        stored = [tensor_a.values(), tensor_b.values()]
        key = f"{source.layer} {source.product} stack {source.is_transposed} {rank} {scale!r}"
        a, b, digest = self._scaled(key, source.pair, stored, scale, scaler)
        a, b = a.reshape(num_experts, rank, -1), b.reshape(-1, rank, num_experts).transpose(2, 1, 0)
        if source.is_transposed:
            a, b = b, a
        b = b.transpose(0, 2, 1)
        parts = {0: (a, b)} if source.product == DOWN else _divided(a, b)
        self._check_rank(max(part_a.shape[1] for part_a, _ in parts.values()), source.pair)
        return parts, digest

    def _scaled(
        self, key: str, pair: Pair, stored: Sequence[np.ndarray], scale: float, scaler: Scaler
    ) -> tuple[np.ndarray, np.ndarray, bytes]:
        digest = hashlib.sha256(key.encode())
        cast = []
        for tensor, values, factor in zip(pair, stored, (1.0, scale), strict=True):
            digest.update(values.reshape(-1).view(np.uint8).data)
            out = values if values.dtype == self._dtype else np.empty(values.shape, self._dtype)
            if not scaler.scale(values, factor, out):
                raise tensor.error(f"NaN or infinity in {self._dtype.name}, in this tensor or another expert's")
            cast.append(out)
        return cast[0], cast[1], digest.digest()

    def _check_rank(self, rank: int, pair: Pair) -> None:
        if rank > self._max_rank:
            raise pair[0].error(f"rank {rank} exceeds --max-lora-rank ({self._max_rank})")


def _placed(parts: Mapping[int, Part], memory: np.ndarray) -> Iterator[tuple[int, Part]]:
    """Yield copies of the parts, one after another in `memory`."""
    begin = 0
    for number, part in parts.items():
        placed = []
        for values in part:
            own = memory[begin : begin + values.size].reshape(values.shape)
            own[...] = values
            placed.append(own)
            begin += values.size
        yield number, (placed[0], placed[1])


def _divided(a: np.ndarray, b: np.ndarray) -> dict[int, Part]:
    """Return gate and up from a [E, r, H], b [E, 2 I, r]. If PEFT stacked two adapters, their ranks are separate: b is
    zero off its two diagonal blocks."""
    size, half = b.shape[1] // 2, a.shape[1] // 2
    is_stacked = 2 * half == a.shape[1] and not b[:, :size, half:].any() and not b[:, size:, :half].any()
    if is_stacked:
        return {0: (a[:, :half], b[:, :size, :half]), 1: (a[:, half:], b[:, size:, half:])}
    return {0: (a, b[:, :size]), 1: (a, b[:, size:])}


def _is_stack(module: str) -> bool:
    match = _MODULE.fullmatch(module)
    return match is not None and match["expert"] is None


def _are_transposed(config: ModelConfig, pairs: Iterable[Pair]) -> bool:
    """Return True if all stacks have shapes of transposed products, and not all are square."""
    (_, size), hidden = _sizes(config), config.hidden_size
    plain, found = ((hidden, 2 * size), (size, hidden)), [_shape(pair) for pair in pairs]
    return any(shape not in plain for shape in found) and all(shape[::-1] in plain for shape in found)


def _stack(config: ModelConfig, layer: int, experts: str, pair: Pair, is_transposed: bool) -> ExpertStack:
    """Name a stack by its shape: wrappers of both stacks are nested, the first in order innermost."""
    (num_experts, size), hidden = _sizes(config), config.hidden_size
    shape = _shape(pair)[::-1] if is_transposed else _shape(pair)
    product = {(hidden, 2 * size): GATE_UP, (size, hidden): DOWN}.get(shape)
    if product is None:
        shapes = f"[{num_experts} r, {hidden}] with {2 * size} outputs or [{num_experts} r, {size}] with {hidden}"
        raise pair[0].error(f"shape {list(pair[0].shape)} with {shape[1]} outputs is no stack's ({shapes})")
    return ExpertStack(layer, product, f"{experts}.{STACK_NAMES[product]}", pair, is_transposed)


def _shape(pair: Pair) -> tuple[int, int]:
    """Return (inputs, outputs) of A and B. Raises ModelError."""
    for tensor in pair:
        if len(tensor.shape) != 2:
            raise tensor.error(f"shape {list(tensor.shape)} is not a matrix's")
    return pair[0].shape[1], pair[1].shape[0]


def _part_of(config: ModelConfig, name: str, expert: int, pair: Pair) -> tuple[str, int]:
    """Return an expert's module as (product, part)."""
    tensors, num_experts = config.tensors, _sizes(config)[0]
    places = {tensors.expert_gate_up[0]: (GATE_UP, 0), tensors.expert_gate_up[1]: (GATE_UP, 1)}
    places[tensors.expert_down] = DOWN, 0
    if name not in places or expert >= num_experts:
        raise pair[0].error(f"no such module of {num_experts} experts ({', '.join(places)})")
    return places[name]


def _sizes(config: ModelConfig) -> tuple[int, int]:
    """Return (number of experts, size of each)."""
    if config.experts is None:
        raise ModelError("the model has no experts")
    return config.experts.num_experts, config.experts.intermediate_size


def _check(tensor: StoredTensor, shape: tuple[int, ...]) -> None:
    """Raise ModelError unless the tensor has this shape, in floats."""
    if tensor.dtype not in FLOAT_DTYPES.values():
        raise tensor.error(f"dtype {tensor.dtype.name} is not supported ({', '.join(FLOAT_DTYPES)})")
    if tensor.shape != shape:
        raise tensor.error(f"shape {list(tensor.shape)} is not {list(shape)} (rank, inputs and outputs)")
