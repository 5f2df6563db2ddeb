"""`--lora-modules`: vLLM's `name=path` or JSON objects."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
MAX_SLOTS = 256
_NAME = re.compile(r"[^\s,=\x00-\x1f\x7f]{1,128}")
_ALLOWED = 'name=path, or {"name": ..., "path": ..., "base_model_name": ...}, comma-separated'
_KEYS = ("name", "path", "base_model_name")
_IGNORED = "is_3d_lora_weight"
"""vLLM's key for expert tensors, which are recognized by name and shape."""


@dataclass(frozen=True)
class LoraModule:
    name: str
    path: str
    base_model_name: str | None = None


@dataclass(frozen=True)
class LoraModules:
    modules: tuple[LoraModule, ...] = ()

    def __str__(self) -> str:
        given = ({key: value for key in _KEYS if (value := getattr(one, key)) is not None} for one in self.modules)
        return ",".join(map(json.dumps, given))


def is_adapter_name(name: str) -> bool:
    """Return whether `name` has 1 to 128 characters, none of them blank, ',' or '='."""
    return _NAME.fullmatch(name) is not None


def parse_lora_modules(text: str) -> LoraModules:
    """Raises ValueError with what is allowed."""
    modules: list[LoraModule] = []
    rest = text.strip()
    while rest:
        module, rest = _json_module(rest) if rest.startswith("{") else _plain_module(rest)
        if not is_adapter_name(module.name) or not module.path:
            raise ValueError(f"{_ALLOWED}; names of 1 to 128 characters without blanks, ',' and '='")
        modules.append(module)
        if rest and not rest.startswith(","):
            raise ValueError(_ALLOWED)
        rest = rest[1:].strip()
    names = [module.name for module in modules]
    if len(set(names)) < len(names):
        raise ValueError("a different name for each adapter")
    return LoraModules(tuple(modules))


def _plain_module(text: str) -> tuple[LoraModule, str]:
    word, comma, rest = text.partition(",")
    name, equals, path = word.partition("=")
    if not equals:
        raise ValueError(_ALLOWED)
    return LoraModule(name.strip(), path.strip()), comma + rest


def _json_module(text: str) -> tuple[LoraModule, str]:
    try:
        given, end = json.JSONDecoder().raw_decode(text)
    except ValueError as error:
        raise ValueError(f"{_ALLOWED}: {error}") from None
    if isinstance(given.get(_IGNORED), bool):
        del given[_IGNORED]
    if not given.keys() <= set(_KEYS) or not all(isinstance(value, str | None) for value in given.values()):
        raise ValueError(_ALLOWED)
    values: dict[str, Any] = {"name": "", "path": "", **given}
    return LoraModule(**values), text[end:].strip()
