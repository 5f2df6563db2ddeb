"""Model loading: allocate the stacked weights, then fill all at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from tqdm import tqdm

from model.config import ModelConfig
from model.errors import ModelError
from model.families.llama import Layer, LayerRotation, Llama, LlamaWeights
from model.kv_cache import part_of_heads
from model.ops.group.arrays import Split, divided, each_rank, own_rows, stacked, whole_nbytes
from model.ops.group.device import upload_parts
from model.ops.interface import Array, Ops
from model.ops.weight import Weight
from model.rope import RopeTables, query_scale, short_length
from model.rope_config import RopeConfig
from model.weights.checkpoint import (
    EMBEDDING,
    FINAL_NORM,
    LM_HEAD,
    Checkpoint,
    expected_shapes,
    loaded_shapes,
    stores_quantised,
)
from model.weights.dummy import DummyWeights
from model.weights.folding import TensorSource, folded
from model.weights.formats.stored_matrix import ConvertedRows, ReadRows, StoredMatrix, check_stackable, equally_ordered
from model.weights.online_fp8 import OnlineFp8, is_layer_matrix, loaded_bytes
from model.weights.sharding import FLAG, Sharding

EXPERT_MULTIPLE = 16
"""Divisor of the inputs of experts' GEMMs on a GPU: 16 bytes in 8 bits."""


@dataclass(frozen=True)
class PlannedWeights:
    num_bytes: int
    expert_bytes: int  # share of num_bytes taken by experts
    label: str  # quantised format; "" for 16 and 32 bits


def plan_weights(
    directory: Path | None, config: ModelConfig, dtype: np.dtype, quantization: str = "auto", num_ranks: int = 1
) -> PlannedWeights:
    """Measure the weights `load_model` would load per rank, for activations in `dtype`. Raises ModelError."""
    sharding = Sharding(config, num_ranks)
    checkpoint = _open_quantised(directory, config)
    label = "" if checkpoint is None else checkpoint.label
    if checkpoint is not None and checkpoint.keeps_formats:
        for name in expected_shapes(config):
            if (matrix := checkpoint.matrix(name)) is not None:
                sharding.array_splits(name, matrix)
        return _planned(checkpoint.num_bytes(config, dtype, sharding.part_shape), config, label)
    if quantization == "fp8":
        label = ", ".join(filter(None, [label, "rounded to fp8 while loading"]))
    return _planned(loaded_bytes(config, dtype, quantization, sharding.part_shape), config, label)


def _planned(num_bytes: dict[str, int], config: ModelConfig, label: str) -> PlannedWeights:
    experts = f".{config.tensors.experts}."
    return PlannedWeights(
        sum(num_bytes.values()), sum(size for name, size in num_bytes.items() if experts in name), label
    )


def _open_quantised(directory: Path | None, config: ModelConfig) -> Checkpoint | None:
    if directory is None or not stores_quantised(directory):
        return None
    return Checkpoint.open(directory, config)


def load_model(
    directory: Path | None,
    config: ModelConfig,
    ops: Ops,
    max_model_len: int,
    *,
    load_format: str = "safetensors",
    quantization: str = "auto",
) -> Llama:
    """Load a model without a progress bar; see `allocate_model`. Raises ModelError."""
    how = {"load_format": load_format, "quantization": quantization}
    return allocate_model(directory, config, ops, max_model_len, **how).load()


def allocate_model(
    directory: Path | None,
    config: ModelConfig,
    ops: Ops,
    max_model_len: int,
    *,
    load_format: str = "safetensors",
    quantization: str = "auto",
) -> AllocatedModel:
    """Allocate a model in the memory and dtype of `ops`, for sequences of at most `max_model_len` tokens.

    load_format "dummy" makes random weights, in the formats of `directory` if it is quantised. quantization "fp8"
    rounds the layers' matrices to e4m3. Scales of an fp8 cache default to 1 (`measure_kv_scales`). Raises ModelError.
    """
    check_device(config, ops)
    if load_format == "dummy":
        source: DummyWeights | Checkpoint = DummyWeights(config, ops.dtype, _open_quantised(directory, config))
    elif directory is None:
        raise ModelError("weights cannot be loaded without a model folder")
    else:
        source = Checkpoint.open(directory, config)
    if quantization == "fp8" and any(source.matrix(name) is not None for name in expected_shapes(config)):
        raise ModelError(f"{directory}: is quantised already, so that --quantization fp8 does not apply (auto)")
    sharding = Sharding(config, ops.num_ranks)
    plan = _Plan(config, ops, folded(source, config), sharding, OnlineFp8(ops) if quantization == "fp8" else None)
    embedding, tied_head = plan.tied() if config.shares_embedding else (plan.tensor(EMBEDDING), None)
    ropes = dict.fromkeys(config.ropes)
    lengths = max_model_len, short_length(ropes, max_model_len)
    rotations = {rope: _plan_rotation(plan, rope, config.head_dim, lengths) for rope in ropes}
    layers = tuple(_plan_layer(plan, config, index, rotations[rope]) for index, rope in enumerate(config.ropes))
    final_norm = plan.tensor(FINAL_NORM)
    lm_head = plan.matrix([LM_HEAD]) if tied_head is None else tied_head
    kv_scales, has_stored_scales = _kv_scales(source, config, ops)
    weights = LlamaWeights(
        embedding=embedding,
        layers=layers,
        final_norm=final_norm,
        lm_head=lm_head,
        kv_scales=kv_scales,
        has_stored_kv_scales=has_stored_scales,
        has_rows_of_embedding=config.shares_embedding,
    )
    return AllocatedModel(plan, Llama(config, ops, weights))


class AllocatedModel:
    """Model whose weights are undefined, and in the files' formats, until `load`."""

    def __init__(self, plan: _Plan, unfilled: Llama):
        self._plan = plan
        self._unfilled = unfilled

    def first_layer(self) -> Llama:
        """Return `Llama.first_layer` with undefined weights; call it inside the work of `Ops.compile_ahead`."""
        self._plan.run_checks()
        return _prepared(self._unfilled.first_layer())

    def load(self, *, progress: bool = False) -> Llama:
        """Fill all weights. `progress` shows a bar if stderr is a terminal. Raises ModelError."""
        self._plan.fill(progress)
        self._plan.check()
        return _prepared(self._unfilled)


def _kv_scales(source: DummyWeights | Checkpoint, config: ModelConfig, ops: Ops) -> tuple[Array | None, bool]:
    """Return the scales of an fp8 cache and whether the checkpoint stores them; (None, False) for other caches."""
    if ops.kv_dtype != np.uint8:
        return None, False
    stored = source.kv_scales()
    scales = np.ones((config.num_layers, 2, config.num_kv_heads), np.float32) if stored is None else stored
    return upload_parts(ops, scales, part_of_heads(config, ops.num_ranks)), stored is not None


@dataclass(frozen=True)
class _Target:
    """Tensor, or array of a quantised matrix, to fill."""

    array: Array
    read_into: Callable[[int, np.ndarray], None]
    nonfinite: Callable[[], ModelError] | None = None  # error for NaN or infinity; None: cannot hold them


class _Plan:
    def __init__(
        self, config: ModelConfig, ops: Ops, source: TensorSource, sharding: Sharding, online: OnlineFp8 | None
    ):
        self._online = online
        self._sharding = sharding
        self._wholes = loaded_shapes(config)
        self._shapes = {name: sharding.part_shape(name, shape) for name, shape in self._wholes.items()}
        self._ops = ops
        self._source = source
        self._targets: list[_Target] = []

    def tensor(self, name: str) -> Array:
        return self.stacked([name])

    def table(self, shape: tuple[int, int], rows: ReadRows) -> Array:
        """Allocate float32 `shape`, filled by the reading threads."""
        array = self._ops.empty(shape, np.dtype(np.float32))
        self._targets.append(_Target(array, ConvertedRows(shape[1], rows).read_into))
        return array

    def stacked(self, names: Sequence[str]) -> Array:
        """Allocate tensors stacked along the first axis."""
        ends = np.cumsum([self._shapes[name][0] for name in names]).tolist()
        splits = [self._sharding.split(name) for name in names]
        array = self._ops.empty((ends[-1], *self._shapes[names[0]][1:]), self._ops.dtype)
        for name, split, (begin, end) in zip(names, splits, pairwise([0, *ends]), strict=True):
            self._add_dense(name, divided(array[begin:end], split))
        return divided(array, stacked(splits))

    def tied(self) -> tuple[Array, Weight]:
        """Return the embedding, whole on each rank, and the head, which is its rows."""
        num_rows, width = self._wholes[EMBEDDING]
        split = self._sharding.split(LM_HEAD)
        if split is None:
            embedding = self.tensor(EMBEDDING)
            return embedding, Weight(embedding)
        num_ranks = self._sharding.num_ranks
        part = split.part_size(num_ranks)
        padded = self._ops.empty((num_ranks * part, width), self._ops.dtype)
        self._add_dense(EMBEDDING, padded[:num_rows])
        return padded[:num_rows], Weight(own_rows(padded, split))

    def matrix(self, names: Sequence[str]) -> Weight:
        """Return matrices with a common input as a `Weight`, in e4m3 if quantised online. Raises ModelError."""
        parts = [self._source.matrix(name) for name in names]
        quantised = [part for part in parts if part is not None]
        shapes = [self._shapes[name] for name in names]
        if self._online is not None and is_layer_matrix(names[0], shapes[0]):
            return self._online.matrix(names, shapes, [self._sharding.split(name) for name in names])
        if not quantised:
            return Weight(self.stacked(names))
        if len(quantised) < len(parts):
            dense = names[parts.index(None)]
            raise ModelError(f"{quantised[0].name}: is quantised, but {dense}, which shares its input, is not")
        return self._quantised(names, equally_ordered(quantised))

    def experts(self, names: Sequence[Sequence[str]]) -> Weight:
        """Return a stack of each expert's matrix; names[e] share their input. Raises ModelError."""
        shapes = [self._shapes[name] for name in names[0]]
        if self._online is not None:
            return self._online.experts(names, shapes, [self._sharding.split(name) for name in names[0]])
        parts = [[self._source.matrix(name) for name in own] for own in names]
        quantised = [[part for part in own if part is not None] for own in parts]
        if not any(quantised):
            stack = self.stacked([name for own in names for name in own])
            return Weight(divided(stack.reshape(len(names), -1, shapes[0][1]), self._split(names[0])))
        first = next(part for own in quantised for part in own)
        for own_names, own in zip(names, parts, strict=True):
            if None in own:
                dense = own_names[own.index(None)]
                raise ModelError(f"{first.name}: is quantised, but {dense}, of the same layer's experts, is in 16 bits")
        ordered = equally_ordered([part for own in quantised for part in own])
        width = len(shapes)
        return self._quantised_experts(names, [ordered[at : at + width] for at in range(0, len(ordered), width)])

    def optional(self, names: Sequence[str]) -> Array | None:
        return self.stacked(names) if names[0] in self._shapes else None

    def fill(self, progress: bool) -> None:
        num_bytes = sum(whole_nbytes(target.array) for target in self._targets)
        num_bytes += 0 if self._online is None else self._online.num_source_bytes
        counting = Lock()
        hidden = None if progress else True  # None: unless stderr is a terminal
        with tqdm(total=num_bytes, unit="B", unit_scale=True, desc="weights", disable=hidden) as bar:

            def count(out: np.ndarray) -> None:
                if not bar.disable:
                    with counting:
                        bar.update(out.nbytes)

            def read(target: int, start: int, out: np.ndarray) -> None:
                self._targets[target].read_into(start, out)
                count(out)

            def read_named(name: str, start: int, out: np.ndarray) -> None:
                self._source.read_into(name, start, out)
                count(out)

            try:
                self._ops.load_parallel([target.array for target in self._targets], read)
                if self._online is not None:
                    self._online.fill(read_named, self._source.nonfinite)
            finally:
                self._ops.release_staging()

    def check(self) -> None:
        """Check weights for NaN and infinity on the device, where reading them again is cheap. Raises ModelError."""
        errors = [(target.array, target.nonfinite) for target in self._targets if target.nonfinite is not None]
        found = self._ops.upload(np.zeros(len(errors), np.int32))
        for place, (array, _) in enumerate(errors):
            self._ops.find_nonfinite(array, found[place : place + 1])
        on_any_rank = self._ops.download(each_rank(found)).reshape(-1, len(errors)).any(axis=0)
        for index in np.flatnonzero(on_any_rank).tolist():
            raise errors[index][1]()

    def run_checks(self) -> None:
        """Run the kernels of `check` once, for `Ops.compile_ahead`."""
        found = self._ops.upload(np.zeros(1, np.int32))
        arrays = {target.array.dtype: target.array for target in self._targets if target.nonfinite is not None}
        for array in arrays.values():
            self._ops.find_nonfinite(array, found)

    def _add_dense(self, name: str, array: Array) -> None:
        error = partial(self._source.nonfinite, name, self._ops.dtype)
        self._targets.append(_Target(array, partial(self._source.read_into, name), error))

    def _quantised(self, names: Sequence[str], parts: list[StoredMatrix]) -> Weight:
        form, order = parts[0].form, parts[0].input_order
        arrays = self._allocate(names, parts, ())
        self._fill_rows(arrays, names, parts)
        arrays["data"] = divided(arrays["data"], self._split(names))
        return Weight(
            **arrays,
            format=form.format,
            group_size=form.group_size,
            quantised_input=form.quantised_input,
            input_order=None if order is None else self._order(names[0], order),
        )

    def _split(self, names: Sequence[str]) -> Split | None:
        return stacked([self._sharding.split(name) for name in names])

    def _quantised_experts(self, names: Sequence[Sequence[str]], experts: list[list[StoredMatrix]]) -> Weight:
        first, orders = experts[0][0], [parts[0].input_order for parts in experts]
        if (other := next((parts[0] for parts in experts if parts[0].form != first.form), None)) is not None:
            raise ModelError(f"{first.name} and {other.name}: are in two formats, but of one layer's experts")
        arrays = self._allocate(names[0], experts[0], (len(experts),))
        for index, parts in enumerate(experts):
            self._fill_rows({name: array[index] for name, array in arrays.items()}, names[index], parts)
        arrays["data"] = divided(arrays["data"], self._split(names[0]))
        known = [order for order in orders if order is not None]
        return Weight(
            **arrays,
            format=first.form.format,
            group_size=first.form.group_size,
            quantised_input=first.form.quantised_input,
            input_order=self._order(names[0][0], np.stack(known)) if known else None,
        )

    def _order(self, name: str, order: np.ndarray) -> Array:
        """Upload int32[..., K], giving each rank its columns. Raises ModelError."""
        split = self._split([name])
        if split is None or split.axis == 0:
            return self._ops.upload(order)
        if self._ops.name == "cuda":
            raise ModelError(f"{name}: its groups (desc_act) take inputs of several GPUs ({FLAG} 1)")
        return upload_parts(self._ops, order, replace(split, axis=order.ndim - 1))

    def _allocate(
        self, names: Sequence[str], parts: Sequence[StoredMatrix], leading: tuple[int, ...]
    ) -> dict[str, Array]:
        """Allocate arrays of the matrix stacked from `parts`, after `leading` dimensions. Raises ModelError."""
        form, formats = parts[0].form, self._ops.weight_formats
        if form.format not in formats:
            known = ", ".join(sorted(formats))
            raise ModelError(f"{parts[0].name}: {form.format} is not supported on {self._ops.device_name} ({known})")
        shapes = self._part_shapes(names, parts)
        total = form.arrays(sum(shape[0] for shape in shapes), shapes[0][1])
        return {name: self._ops.empty((*leading, *shape), dtype) for name, (shape, dtype) in total.items()}

    def _fill_rows(self, arrays: dict[str, Array], names: Sequence[str], parts: list[StoredMatrix]) -> None:
        """Plan to fill arrays. Raises ModelError unless the parts can be stacked and divided."""
        check_stackable(parts)
        form, shapes = parts[0].form, self._part_shapes(names, parts)
        splits = [self._sharding.array_splits(name, part) for name, part in zip(names, parts, strict=True)]
        for name, array in arrays.items():
            begin = 0
            for part, shape, split in zip(parts, shapes, splits, strict=True):
                end = begin + form.arrays(*shape)[name][0][0]
                e4m3 = part.e4m3 if name == "data" else None
                error = None if e4m3 is None else partial(e4m3.error, "holds NaN")
                target = divided(array[begin:end], split[name])
                self._targets.append(_Target(target, part.arrays[name].read_into, error))
                begin = end

    def _part_shapes(self, names: Sequence[str], parts: Sequence[StoredMatrix]) -> list[tuple[int, int]]:
        shapes = [self._sharding.part_shape(name, part.shape) for name, part in zip(names, parts, strict=True)]
        return [(num_outputs, num_inputs) for num_outputs, num_inputs in shapes]


def _prepared(model: Llama) -> Llama:
    """Return the model with weights in the formats of the GEMMs."""
    ops, weights = model.ops, model.weights
    lm_head = weights.lm_head if weights.has_rows_of_embedding else ops.prepare_weight(weights.lm_head)
    layers = tuple(_prepared_layer(layer, ops) for layer in weights.layers)
    return Llama(model.config, ops, replace(weights, layers=layers, lm_head=lm_head))


def _prepared_layer(layer: Layer, ops: Ops) -> Layer:
    names = ("qkv", "output", "gate_up", "down", *(() if layer.router is None else ("router",)))
    matrices: dict[str, Any] = {name: ops.prepare_weight(getattr(layer, name)) for name in names}
    return replace(layer, **matrices)


def _plan_rotation(plan: _Plan, rope: RopeConfig, head_dim: int, lengths: tuple[int, int]) -> LayerRotation:
    """Plan a layer's rotation; `lengths` as in RopeTables."""
    max_model_len, short_len = lengths
    tables, scale = RopeTables(rope, head_dim, max_model_len, short_len), query_scale(rope, max_model_len)
    whole = [plan.table(tables.shape, rows) for rows in (tables.cos, tables.sin)]
    if scale is None:
        return LayerRotation(*whole)

    of_rows = np.concatenate([scale, scale[:short_len]])

    def scaled(rows: ReadRows, first: int, last: int) -> np.ndarray:
        table: np.ndarray = rows(first, last) * of_rows[first:last, None]
        return table

    of_queries = [plan.table(tables.shape, partial(scaled, rows)) for rows in (tables.cos, tables.sin)]
    return LayerRotation(*whole, *of_queries)


def _plan_layer(plan: _Plan, config: ModelConfig, index: int, rotation: LayerRotation) -> Layer:
    tensors, prefix = config.tensors, f"model.layers.{index}."

    def names(modules: Sequence[str], kind: str) -> list[str]:
        return [f"{prefix}{module}.{kind}" for module in modules]

    return Layer(
        attention_norm=plan.tensor(f"{prefix}{tensors.attention_norm}.weight"),
        qkv=plan.matrix(names(tensors.qkv, "weight")),
        qkv_bias=plan.optional(names(tensors.qkv, "bias")),
        q_norm=plan.optional([f"{prefix}{tensors.q_norm}.weight"]),
        k_norm=plan.optional([f"{prefix}{tensors.k_norm}.weight"]),
        rotation=rotation,
        output=plan.matrix(names([tensors.output], "weight")),
        output_bias=plan.optional(names([tensors.output], "bias")),
        mlp_norm=plan.tensor(f"{prefix}{tensors.mlp_norm}.weight"),
        gate_up_bias=plan.optional(names(tensors.gate_up, "bias")),
        down_bias=plan.optional(names([tensors.down], "bias")),
        **_plan_mlp(plan, config, index, names),
    )


def _plan_mlp(
    plan: _Plan, config: ModelConfig, index: int, names: Callable[[Sequence[str], str], list[str]]
) -> dict[str, Weight]:
    tensors = config.tensors
    if config.experts is None or not config.experts.layers[index]:
        gate_up = plan.matrix(names(tensors.gate_up, "weight"))
        return {"gate_up": gate_up, "down": plan.matrix(names([tensors.down], "weight"))}
    experts = [tensors.of_expert(expert) for expert in range(config.experts.num_experts)]
    router = Weight(plan.stacked(names([tensors.router], "weight")))
    gate_up = plan.experts([names(gate_up, "weight") for gate_up, _ in experts])
    down = plan.experts([names([down], "weight") for _, down in experts])
    return {"router": router, "gate_up": gate_up, "down": down}


def check_device(config: ModelConfig, ops: Ops) -> None:
    """Raise ModelError for a model without kernels on this device."""
    if config.experts is None or ops.name != "cuda":
        return
    if ops.dtype == np.float32:
        raise ModelError(f"--dtype: float32 has no products of experts on a GPU, which {config.family} needs (auto)")
    own_size = config.experts.intermediate_size // ops.num_ranks
    for name, size in {"hidden_size": config.hidden_size, "moe_intermediate_size": own_size}.items():
        if size % EXPERT_MULTIPLE:
            raise ModelError(f"{name}: {size} columns of experts are not supported on a GPU (a multiple of 16)")
