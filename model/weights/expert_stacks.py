"""Experts of a layer in one tensor, as transformers 5 has them in memory: read as a tensor for each."""

from __future__ import annotations

import math
from dataclasses import replace

from model.config import ModelConfig
from model.weights.formats.stored_matrix import BLOCK
from model.weights.safetensors_file import StoredTensor

SCALES = "_scale_inv"
"""Ends the names of fp8 scales."""


def split_stacks(tensors: dict[str, StoredTensor], config: ModelConfig) -> dict[str, StoredTensor]:
    """Replace stacks, of gate and up [E, 2 I, H] and down [E, H, I], by each expert's matrices. Raises ModelError.

    A stack's scales are those of its blocks or [E, 1, 1].
    """
    if config.experts is None:
        return tensors
    found = dict(tensors)
    size, hidden = config.experts.intermediate_size, config.hidden_size
    modules = [config.tensors.of_expert(expert) for expert in range(config.experts.num_experts)]
    gate_up, down = config.tensors.stacks
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        for stack, names, shape in (
            (gate_up, [both for both, _ in modules], (size, hidden)),
            (down, [[one] for _, one in modules], (hidden, size)),
        ):
            if (weight := found.pop(f"{prefix}{stack}", None)) is not None:
                parts = _split(weight, names, shape)
                found |= {f"{prefix}{name}.weight": part for name, part in parts.items()}
            if (scale := found.pop(f"{prefix}{stack}{SCALES}", None)) is not None:
                parts = _split_scales(scale, names, shape)
                found |= {f"{prefix}{name}.weight{SCALES}": part for name, part in parts.items()}
    return found


def _split(stack: StoredTensor, names: list[list[str]], shape: tuple[int, int]) -> dict[str, StoredTensor]:
    """Return views [N, K], one below the other."""
    expected = (len(names), len(names[0]) * shape[0], shape[1])
    if stack.shape != expected:
        raise stack.error(f"shape is {list(stack.shape)}, but the config makes it {list(expected)}")
    num_bytes = math.prod(shape) * stack.dtype.itemsize
    flat = ((expert, name) for expert, own in enumerate(names) for name in own)
    return {
        name: replace(stack, name=f"{stack.name}[{expert}]", shape=shape, offset=stack.offset + place * num_bytes)
        for place, (expert, name) in enumerate(flat)
    }


def _split_scales(stack: StoredTensor, names: list[list[str]], shape: tuple[int, int]) -> dict[str, StoredTensor]:
    if stack.shape[1:] != (1, 1):
        rows, columns = (-(-each // BLOCK) for each in shape)
        return _split(stack, names, (rows, columns))
    scale_of = _split(stack, [own[:1] for own in names], (1, 1))
    return {name: scale_of[own[0]] for own in names for name in own}
