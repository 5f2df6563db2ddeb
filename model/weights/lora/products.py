"""Products of a layer that adapters change, and their modules."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from model.config import ModelConfig
from model.ops.group.arrays import Split
from model.weights.checkpoint import layer_shapes
from model.weights.sharding import Sharding

ROUTER, GATE_UP, DOWN = "router", "expert_gate_up", "expert_down"
"""Products of a layer with experts; "gate_up" and "down" are a dense MLP's."""

STACK_NAMES = {GATE_UP: "gate_up_proj", DOWN: "down_proj"}
"""Products with a matrix per expert, and the transformers 5 parameters that hold them all."""

Part = tuple[np.ndarray, np.ndarray]
"""A [r, K], B [N, r] times the scale."""


@dataclass(frozen=True)
class ProductPart:
    """Module of a layer's stacked product, as held by a rank."""

    num_outputs: int
    num_inputs: int
    split: Split | None  # split of the weight [N, K]; A [r, K] or B [N, r] is divided likewise


def product_parts(
    config: ModelConfig, layer: int, sharding: Sharding, with_experts: bool = False
) -> dict[str, list[ProductPart]]:
    """Return the parts of each product of a layer; for a stack, one expert's. `with_experts`: include router and
    experts."""
    shapes = layer_shapes(config, layer)

    def part(module: str) -> ProductPart:
        name, shape = f"model.layers.{layer}.{module}.weight", shapes[f"{module}.weight"]
        return ProductPart(*two(sharding.part_shape(name, shape)), sharding.split(name))

    products = modules_of(config, layer, with_experts)
    if with_experts and config.has_experts(layer):
        gate_up, down = config.tensors.of_expert(0)
        products |= {GATE_UP: tuple(gate_up), DOWN: (down,)}
    return {product: list(map(part, modules)) for product, modules in products.items()}


def modules_of(config: ModelConfig, layer: int, with_router: bool = False) -> dict[str, tuple[str, ...]]:
    """Return the modules of each product, without experts."""
    tensors = config.tensors
    products = {"qkv": tensors.qkv, "output": (tensors.output,)}
    if not config.has_experts(layer):
        return {**products, "gate_up": tensors.gate_up, "down": (tensors.down,)}
    return {**products, ROUTER: (tensors.router,)} if with_router else products


def two(shape: tuple[int, ...]) -> tuple[int, int]:
    num_outputs, num_inputs = shape
    return num_outputs, num_inputs
