"""LoRA adapters of experts and routers, of random values, in every form that PEFT writes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from model.config import ModelConfig
from model.weights.checkpoint import expected_shapes
from model.weights.safetensors_file import FLOAT_DTYPES
from tests.support.safetensors_bytes import save

FORMS = ("each", "stacks", "fused", "transposed")
"""Tensors of each expert's modules (transformers 4); of stacks, gate and up with an A of their own, as PEFT converts
those, or with one A; that transposed, as PEFT before 0.19.1 wrote it."""

GATE_UP_KEY = r".*\.gate_up_proj"
"""Key of its rank and alpha that PEFT writes."""

Pair = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class WrittenExperts:
    folder: Path
    tensors: dict[str, np.ndarray]
    deltas: Mapping[str, np.ndarray]  # by module of the checkpoint


@dataclass
class _Writer:
    config: ModelConfig
    form: str
    rank: int
    scale: float
    strength: float
    dtype: np.dtype
    rng: np.random.Generator
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    deltas: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.shapes, self.names = expected_shapes(self.config), self.config.tensors

    def write_module(self, module: str, stored: str) -> None:
        """Write a matrix of the checkpoint, named `stored` in the adapter."""
        self._put(stored, self._pair(module))

    def write_experts(self, prefix: str, experts: Iterable[int] | None) -> None:
        gate_ups, downs = [], []
        for expert in range(self.config.experts.num_experts):
            gate_up, down = self.names.of_expert(expert)
            gate, up, down = (prefix + name for name in (*gate_up, down))
            if self.form == "each":
                for module in (gate, up, down) if experts is None or expert in experts else ():
                    self.write_module(module, module)
                continue
            gate_ups.append(self._gate_up(gate, up))
            downs.append(self._pair(down))
        if self.form == "each":
            return
        inner, outer = (downs, gate_ups) if self.form == "transposed" else (gate_ups, downs)
        self._put(f"{prefix}mlp.experts.base_layer", self._stacked(inner))
        self._put(f"{prefix}mlp.experts", self._stacked(outer))

    def _gate_up(self, gate: str, up: str) -> Pair:
        """Return a [r, H] and b [2 I, r] of both, with the ranks of one after the other's if "stacks"."""
        (a_gate, b_gate), size = self._pair(gate), self.shapes[f"{gate}.weight"][0]
        if self.form != "stacks":
            return a_gate, np.concatenate([b_gate, self._pair(up, a_gate)[1]])
        a_up, b_up = self._pair(up)
        b = np.zeros((2 * size, 2 * self.rank), self.dtype)
        b[:size, : self.rank], b[size:, self.rank :] = b_gate, b_up
        return np.concatenate([a_gate, a_up]), b

    def _pair(self, module: str, a: np.ndarray | None = None) -> Pair:
        (num_outputs, num_inputs), rng = self.shapes[f"{module}.weight"], self.rng
        if a is None:
            a = (rng.standard_normal((self.rank, num_inputs)) / math.sqrt(num_inputs)).astype(self.dtype)
        size = 0.2 * self.strength / (self.scale * math.sqrt(self.rank))
        b = (rng.standard_normal((num_outputs, self.rank)) * size).astype(self.dtype)
        self.deltas[module] = np.float32(self.scale) * (b.astype(np.float32) @ a.astype(np.float32))
        return a, b

    def _stacked(self, pairs: Sequence[Pair]) -> Pair:
        a, b = (np.stack(side) for side in zip(*pairs, strict=True))
        if self.form == "transposed":
            a, b = b.transpose(0, 2, 1), a.transpose(0, 2, 1)
        return a.reshape(-1, a.shape[2]), b.transpose(1, 2, 0).reshape(b.shape[1], -1)

    def _put(self, module: str, pair: Pair) -> None:
        for side, values in zip("AB", pair, strict=True):
            self.tensors[f"base_model.model.{module}.lora_{side}.weight"] = np.ascontiguousarray(values)


def write_expert_adapter(
    folder: Path,
    config: ModelConfig,
    form: str = "each",
    *,
    rank: int = 4,
    alpha: float = 8,
    seed: int = 0,
    strength: float = 1.0,
    with_router: bool = True,
    experts: Iterable[int] | None = None,
    dtype: np.dtype = FLOAT_DTYPES["F32"],
    **fields,
) -> WrittenExperts:
    """Write an adapter of experts' projections, of routers and of q; `fields` join adapter_config.json.

    `experts`: numbers that have tensors, if "each" (None: all).
    """
    writer = _Writer(config, form, rank, alpha / rank, strength, dtype, np.random.default_rng(seed))
    block = config.tensors.experts.rpartition(".")[0] if form == "each" else "mlp"
    for layer in filter(config.has_experts, range(config.num_layers)):
        prefix = f"model.layers.{layer}."
        writer.write_module(prefix + config.tensors.qkv[0], prefix + config.tensors.qkv[0])
        if with_router:
            writer.write_module(prefix + config.tensors.router, f"{prefix}{block}.gate")
        writer.write_experts(prefix, experts)
    folder.mkdir(parents=True, exist_ok=True)
    save(folder / "adapter_model.safetensors", writer.tensors)
    written = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": ".*"}
    if form != "each":
        written["target_parameters"] = ["gate_up_proj", "down_proj"] + ["gate.weight"] * with_router
    if form == "stacks":
        written |= {"rank_pattern": {GATE_UP_KEY: 2 * rank}, "alpha_pattern": {GATE_UP_KEY: 2 * alpha}}
    (folder / "adapter_config.json").write_text(json.dumps(written | fields))
    return WrittenExperts(folder, writer.tensors, writer.deltas)


GATE_UP_KEY = r".*\.gate_up_proj"
