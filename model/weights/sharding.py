"""Division of a model's tensors among the ranks of a group.

q, k, v, gate and up are split by outputs (heads, MLP columns), o and down by inputs, the head by the vocabulary.
Embedding and norms are whole on each rank. KV heads are copied if there are fewer than ranks.
"""

from __future__ import annotations

import math
from dataclasses import replace

from model.config import ModelConfig
from model.errors import ModelError
from model.kv_cache import part_of_heads
from model.ops.group.arrays import Section, Split
from model.ops.weight import WeightFormat
from model.weights.checkpoint import LM_HEAD
from model.weights.formats.stored_matrix import BLOCK, StoredMatrix

FLAG = "--tensor-parallel-size"
SIZES = (1, 2, 4, 8)


class Sharding:
    def __init__(self, config: ModelConfig, num_ranks: int):
        """Raises ModelError for a number of ranks that does not divide the model."""
        self.num_ranks = num_ranks
        if num_ranks > 1:
            _check(config, num_ranks)
        self._modules = _output_sections(config, num_ranks)
        self._inputs = _input_sizes(config)
        self._vocabulary = Section(config.vocab_size)

    def split(self, name: str) -> Split | None:
        """Return a tensor's split; None: whole on each rank."""
        if self.num_ranks == 1:
            return None
        if name == LM_HEAD:
            return Split(0, (self._vocabulary,))
        module, _, kind = name.partition(".layers.")[2].partition(".")[2].rpartition(".")
        if module in self._modules:
            return Split(0, self._modules[module])
        if module in self._inputs and kind == "weight":
            return Split(1, (Section(self._inputs[module]),))
        return None

    def part_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        split = self.split(name)
        return shape if split is None else split.part_shape(shape, self.num_ranks)

    def array_splits(self, name: str, matrix: StoredMatrix) -> dict[str, Split | None]:
        """Return the split of each array of a quantised matrix. Raises ModelError for a block or group across two
        ranks."""
        split, form, module = self.split(name), matrix.form, matrix.name
        if split is None:
            return dict.fromkeys(("data", "scale", "zero_point"))
        if split.axis == 0:
            scale = _in_units(split, BLOCK, self.num_ranks, module) if form.format is WeightFormat.FP8_BLOCK else split
            return {"data": split, "scale": scale, "zero_point": scale}
        if form.format is WeightFormat.INT4:
            data = _in_units(split, 2, self.num_ranks, module)
            groups = _in_units(split, form.group_size, self.num_ranks, module)
            return {"data": data, "scale": groups, "zero_point": groups}
        blocks = _in_units(split, BLOCK, self.num_ranks, module) if form.format is WeightFormat.FP8_BLOCK else None
        return {"data": split, "scale": blocks, "zero_point": None}


def _output_sections(config: ModelConfig, num_ranks: int) -> dict[str, tuple[Section, ...]]:
    tensors, head_dim = config.tensors, config.head_dim
    [heads] = part_of_heads(config, num_ranks).sections
    keys = Section(heads.size * head_dim, heads.copies)
    qkv = (Section(config.num_heads * head_dim), keys, keys)
    gate_up = (Section(config.intermediate_size),) * 2
    modules: dict[str, tuple[Section, ...]] = {}
    experts = config.experts
    if experts is not None:
        own = (Section(experts.intermediate_size),)
        for expert in range(experts.num_experts):
            modules |= dict.fromkeys(tensors.of_expert(expert)[0], own)
    for names, sections in ((tensors.qkv, qkv), (tensors.gate_up, gate_up)):
        each = [sections] if len(names) == 1 else [(section,) for section in sections]
        modules |= dict(zip(names, each, strict=True))
    return modules


def _input_sizes(config: ModelConfig) -> dict[str, int]:
    tensors, experts = config.tensors, config.experts
    sizes = {tensors.output: config.num_heads * config.head_dim, tensors.down: config.intermediate_size}
    if experts is not None:
        sizes |= {tensors.of_expert(each)[1]: experts.intermediate_size for each in range(experts.num_experts)}
    return sizes


def _in_units(split: Split, unit: int, num_ranks: int, module: str) -> Split:
    """Return the split of an array with one element per `unit` of the axis. Raises ModelError."""
    for section in split.sections:
        part = section.size * section.copies // num_ranks
        if part % unit:
            what = "rows" if split.axis == 0 else "inputs"
            allowed = [n for n in SIZES if section.size // math.gcd(n, section.size) % unit == 0]
            raise ModelError(
                f"{module}: a block or group of {unit} {what} straddles ranks, which have {part} each "
                f"({FLAG} {', '.join(map(str, allowed))})"
            )
    return replace(split, sections=tuple(each._replace(size=each.size // unit) for each in split.sections))


def _check(config: ModelConfig, num_ranks: int) -> None:
    problem = _problem(config, num_ranks)
    if problem is not None:
        allowed = ", ".join(str(each) for each in SIZES if _problem(config, each) is None)
        raise ModelError(f"{FLAG}: {problem} ({allowed})")


def _problem(config: ModelConfig, num_ranks: int) -> str | None:
    heads, kv_heads = config.num_heads, config.num_kv_heads
    counts, experts = {"attention heads": heads}, config.experts
    if experts is None or not all(experts.layers):
        counts["columns of the MLP"] = config.intermediate_size
    if experts is not None:
        counts["columns of an expert"] = experts.intermediate_size
    for what, count in counts.items():
        if count % num_ranks:
            return f"{num_ranks} does not divide {count} {what}"
    if kv_heads % num_ranks and num_ranks % kv_heads:
        return f"of {num_ranks} ranks and {kv_heads} KV heads neither divides the other"
    part = -(-config.vocab_size // num_ranks)
    if (num_ranks - 1) * part >= config.vocab_size:
        return f"the last of {num_ranks} ranks gets nothing of the vocabulary of {config.vocab_size}"
    return None
