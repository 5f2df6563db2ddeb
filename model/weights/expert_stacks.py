"""Stacks of a layer's experts in one tensor, as in transformers 5, read as one tensor per expert."""

from __future__ import annotations

import math
import re
from dataclasses import replace

from model.config import ModelConfig
from model.weights.formats.stored_matrix import BLOCK
from model.weights.safetensors_file import StoredTensor

MODULES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""An expert's modules in each stack, top to bottom."""

GRANITE = {"moe.input_linear.weight": "moe.experts.gate_up_proj", "moe.output_linear.weight": "moe.experts.down_proj"}
"""Name endings in Granite's files."""

_STACK = re.compile(rf"((?:.*\.)?layers\.[0-9]+\.\w+\.experts\.)({'|'.join(MODULES)})(_scale_inv)?")


def split_stacks(tensors: dict[str, StoredTensor], config: ModelConfig) -> dict[str, StoredTensor]:
    """Replace stacks (gate and up [E, 2 I, H], down [E, H, I]) by each expert's matrices. Raises ModelError.

    A stack's scales are per block or [E, 1, 1].
    """
    if config.experts is None:
        return tensors
    split: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        plain = name
        for granite, other in GRANITE.items():
            plain = plain.replace(granite, other)
        if (found := _STACK.fullmatch(plain)) is None:
            split[name] = tensor
            continue
        prefix, kind, suffix = found[1], found[2], found[3] or ""
        rows, columns = config.experts.intermediate_size, config.hidden_size
        if kind == "down_proj":
            rows, columns = columns, rows
        if suffix:
            rows, columns = -(-rows // BLOCK), -(-columns // BLOCK)
        for expert, views in enumerate(_views(tensor, config.experts.num_experts, len(MODULES[kind]), (rows, columns))):
            modules = zip(MODULES[kind], views, strict=True)
            split |= {f"{prefix}{expert}.{module}.weight{suffix}": view for module, view in modules}
    return split


def _views(stack: StoredTensor, num_experts: int, num_parts: int, shape: tuple[int, int]) -> list[list[StoredTensor]]:
    """Return each expert's stacked matrices; all share one view if the stack is [E, 1, 1]."""
    if stack.shape == (num_experts, 1, 1):
        return [[view] * num_parts for [view] in _views_of(stack, num_experts, 1, (1, 1))]
    expected = (num_experts, num_parts * shape[0], shape[1])
    if stack.shape != expected:
        raise stack.error(f"shape is {list(stack.shape)}, but the config makes it {list(expected)}")
    return _views_of(stack, num_experts, num_parts, shape)


def _views_of(
    stack: StoredTensor, num_experts: int, num_parts: int, shape: tuple[int, int]
) -> list[list[StoredTensor]]:
    num_bytes = math.prod(shape) * stack.dtype.itemsize
    names = [f"{stack.name}[{expert}]" for expert in range(num_experts)]
    places = [range(expert * num_parts, (expert + 1) * num_parts) for expert in range(num_experts)]
    return [
        [replace(stack, name=name, shape=shape, offset=stack.offset + place * num_bytes) for place in own]
        for name, own in zip(names, places, strict=True)
    ]
