"""PEFT's adapter_config.json: a field that changes the result is honoured, or refused by name."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.config_fields import Fields
from model.json_files import read_json_object

CONFIG_FILE = "adapter_config.json"
CONFIG_BYTES = 1 << 20
MAX_RANK = 512
MAX_ALPHA = 1e6
MAX_REGEX_CHARS = 4096
ALL_LINEAR = "all-linear"
TASKS = (None, "CAUSAL_LM", "FEATURE_EXTRACTION")
NEUTRAL: tuple[Any, ...] = (None, False, [], {}, "")

REFUSED = {
    "use_dora": "DoRA is not supported (plain LoRA)",
    "modules_to_save": "whole modules are not supported (plain LoRA; merge them into the model)",
    "lora_bias": "biases are not supported (plain LoRA)",
    "fan_in_fan_out": "transposed weights are not supported (false)",
    "trainable_token_indices": "trained embeddings are not supported (plain LoRA)",
    "layer_replication": "replicated layers are not supported (plain LoRA)",
    "alora_invocation_tokens": "activated LoRA is not supported (plain LoRA)",
    "use_qalora": "QALoRA is not supported (plain LoRA)",
    "use_bdlora": "block-diagonal LoRA is not supported (plain LoRA)",
    "arrow_config": "routed adapters are not supported (plain LoRA)",
    "monteclora_config": "MonteCLoRA is not supported (plain LoRA)",
    "velora_config": "VeLoRA is not supported (plain LoRA)",
}
"""Fields refused unless neutral."""

PLAIN_STARTS = (None, True, False, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that leave the base model's weights unchanged."""

KNOWN = frozenset(
    (
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "rank_pattern"),
        *("alpha_pattern", "use_rslora", "init_lora_weights", "inference_mode", "auto_mapping", "runtime_config"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "megatron_config", "ensure_weight_tying"),
        *("target_parameters",),
    )
)
"""Switches and sections that are read here or do not change the result. Others are refused when switched on."""

ANY_MODULE = r".*\."
"""Prefix that PEFT writes to a pattern's key for stacks of experts; the key means the same without it."""

STACKED = "gate_up_proj"
"""Ending of the keys of gate and up stacks, whose rank may be the sum of both; checked when read."""

EXPERTS_ARE_OFF = "adapters of experts and routers are off (--lora-experts)"

_PLAIN_KEY = re.compile(r"\^?[A-Za-z0-9_.]+")


@dataclass(frozen=True)
class AdapterConfig:
    rank: int
    alpha: float
    is_rank_stabilised: bool
    ranks: Mapping[str, int]  # by a module's name or its ending
    alphas: Mapping[str, float]
    expected: tuple[str, ...]  # modules whose tensors must exist
    parameters: tuple[str, ...] = ()  # of experts and routers, from target_parameters; tensors must exist too

    @property
    def key(self) -> str:
        """Return the fields that change the result, as text."""
        return json.dumps([self.rank, self.alpha, self.is_rank_stabilised, dict(self.ranks), dict(self.alphas)])

    def rank_and_scale(self, module: str) -> tuple[int, float]:
        """Return a module's or parameter's rank and the factor of B @ A."""
        if f"{module}.weight" in self.parameters:
            module += ".weight"
        rank = int(_of_pattern(self.ranks, module, self.rank))
        alpha = float(_of_pattern(self.alphas, module, self.alpha))
        return rank, alpha / (math.sqrt(rank) if self.is_rank_stabilised else rank)


def read_adapter_config(
    directory: Path,
    modules: Sequence[str],
    num_layers: int,
    max_rank: int,
    experts: Collection[str] = (),
    parameters: Collection[str] | None = (),
) -> AdapterConfig:
    """Read and check the config of an adapter for `modules` of a model. Raises ModelError with the field.

    `experts`: names of experts' projections and routers. Targets may name them: where transformers stores a layer's
    experts in one parameter, PEFT adapts none of them. `parameters`: names that target_parameters may end in; None:
    they are off.
    """
    path = directory / CONFIG_FILE
    fields = Fields(read_json_object(path, CONFIG_BYTES), str(path))
    _check_kind(fields)
    rank = fields.integer("r", high=MAX_RANK)
    ranks = {key: _rank(fields, key, value) for key, value in _pattern(fields, "rank_pattern").items()}
    highest = max([rank, *(value for key, value in ranks.items() if not (parameters and key.endswith(STACKED)))])
    if highest > max_rank:
        raise fields.error("r", f"rank {highest} exceeds --max-lora-rank ({max_rank})")
    return AdapterConfig(
        rank=rank,
        alpha=_alpha(fields, "lora_alpha", fields.get("lora_alpha")),
        is_rank_stabilised=fields.boolean("use_rslora", False),
        ranks=ranks,
        alphas={
            key: _alpha(fields, "alpha_pattern", value) for key, value in _pattern(fields, "alpha_pattern").items()
        },
        expected=_expected(fields, modules, num_layers, experts),
        parameters=_parameters(fields, parameters),
    )


def _check_kind(fields: Fields) -> None:
    if (kind := fields.get("peft_type")) != "LORA":
        raise fields.error("peft_type", f"{kind!r} is not supported (LORA)")
    if (task := fields.get("task_type")) not in TASKS:
        raise fields.error("task_type", f"{task!r} is not supported (CAUSAL_LM)")
    if (bias := fields.get("bias")) not in (None, "none"):
        raise fields.error("bias", f"{bias!r} is not supported (none)")
    if (start := fields.get("init_lora_weights")) not in PLAIN_STARTS:
        problem = "changes the base model's weights, which is not supported (convert the adapter to plain LoRA)"
        raise fields.error("init_lora_weights", f"{start!r} {problem}")
    for name, problem in REFUSED.items():
        if fields.get(name) not in NEUTRAL:
            raise fields.error(name, problem)
    for name in sorted(fields.raw.keys() - KNOWN):
        value = fields.get(name)
        if value is True or (isinstance(value, list | dict) and value):
            raise fields.error(name, "is not known here, and may change the result (leave it out)")


def _rank(fields: Fields, key: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise fields.error("rank_pattern", f"{key}: {value!r} is not a rank (1..{MAX_RANK})")
    return value


def _alpha(fields: Fields, name: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value <= MAX_ALPHA:
        raise fields.error(name, f"{value!r} is not a number above 0 (at most {MAX_ALPHA:g})")
    return float(value)


def _pattern(fields: Fields, name: str) -> dict[str, Any]:
    section = fields.section(name)
    raw = {} if section is None else section.raw
    found = {key.removeprefix(ANY_MODULE): value for key, value in raw.items()}
    for key in found:
        if not _PLAIN_KEY.fullmatch(key):
            raise fields.error(name, f"key {key[:100]!r} is a regular expression (a module's name or its end)")
    return found


def _of_pattern(pattern: Mapping[str, float], module: str, default: float) -> float:
    """Return the first match, as PEFT does: a key after "^" is the whole name, else its ending."""
    for key, value in pattern.items():
        if (module == key[1:]) if key.startswith("^") else f".{module}".endswith(f".{key}"):
            return value
    return default


def _parameters(fields: Fields, known: Collection[str] | None) -> tuple[str, ...]:
    targets = fields.get("target_parameters")
    if targets in NEUTRAL:
        return ()
    if known is None:
        raise fields.error("target_parameters", EXPERTS_ARE_OFF)
    if not isinstance(targets, list) or not all(isinstance(one, str) for one in targets):
        raise fields.error("target_parameters", "not a list of names")
    for target in targets:
        if not any(_ends_with(name, target) for name in known):
            ends = ", ".join(dict.fromkeys(".".join(name.split(".")[-2:]) for name in known)) or "the model has none"
            raise fields.error("target_parameters", f"{target[:100]!r} is not supported ({ends})")
    return tuple(name for name in known if any(_ends_with(name, target) for target in targets))


def _expected(fields: Fields, modules: Sequence[str], num_layers: int, experts: Collection[str]) -> tuple[str, ...]:
    """Return the modules named by the config. A regular expression names none: the tensors show its matches."""
    targets = fields.get("target_modules")
    layers = _layers(fields, num_layers)
    if isinstance(targets, str) and targets != ALL_LINEAR:
        _check_expression(fields, targets)
        return ()
    if targets in NEUTRAL and fields.get("target_parameters") not in NEUTRAL:
        return ()
    if targets == ALL_LINEAR:
        chosen = list(modules)
    elif isinstance(targets, list) and targets and all(isinstance(one, str) for one in targets):
        chosen = [module for module in modules if any(_ends_with(module, target) for target in targets)]
        served = (*modules, *experts)
        missing = [one for one in targets if not any(_ends_with(module, one) for module in served)]
        if missing:
            known = ", ".join(dict.fromkeys(module.rpartition(".")[2] for module in modules))
            raise fields.error("target_modules", f"{missing[0][:100]!r} is not supported ({known})")
    else:
        raise fields.error("target_modules", f'not a list of names, an expression or "{ALL_LINEAR}"')
    excluded = fields.get("exclude_modules") or ()
    if isinstance(excluded, str):
        _check_expression(fields, excluded)
        return ()
    if not isinstance(excluded, list | tuple):
        raise fields.error("exclude_modules", "not a list of names or an expression")
    return tuple(
        module
        for module in chosen
        if int(module.split(".")[2]) in layers and not any(_ends_with(module, one) for one in excluded)
    )


def _check_expression(fields: Fields, text: str) -> None:
    try:
        re.compile(text[:MAX_REGEX_CHARS])
    except (re.error, RecursionError):
        raise fields.error("target_modules", f"{text[:100]!r} is not a regular expression") from None


def _layers(fields: Fields, num_layers: int) -> range | frozenset[int]:
    chosen = fields.get("layers_to_transform")
    if chosen is None or chosen == []:
        return range(num_layers)
    layers = chosen if isinstance(chosen, list) else [chosen]
    if not all(type(one) is int and 0 <= one < num_layers for one in layers):
        raise fields.error("layers_to_transform", f"not layers of 0..{num_layers - 1}")
    return frozenset(layers)


def _ends_with(module: str, target: Any) -> bool:
    return isinstance(target, str) and bool(target) and f".{module}".endswith(f".{target}")
