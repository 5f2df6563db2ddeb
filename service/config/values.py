"""Parsers of settings that are not plain numbers or text. Each raises ValueError with what is allowed."""

from __future__ import annotations

import json
import re
from pathlib import Path

from model.rope_config import OVERRIDES, first_unknown


def parse_name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", text):
        raise ValueError("1 to 64 letters, digits, '.', '_' and '-'")
    return text


def parse_names(text: str) -> tuple[str, ...]:
    found = tuple(name.strip() for name in text.split(",") if name.strip())
    if not all(re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name) for name in found):
        raise ValueError("names of 1 to 64 letters, digits, '.', '_' and '-', comma-separated")
    return found


def parse_hosts(text: str) -> tuple[str, ...]:
    found = tuple(host.strip().lower() for host in text.split(",") if host.strip())
    if not all(re.fullmatch(r"\*|(\*\.)?[a-z0-9_.-]{1,253}|\[?[0-9a-f:.]+\]?", host) for host in found):
        raise ValueError("names, addresses, *.domain or *, without a port, comma-separated")
    return found


def parse_keys(text: str) -> tuple[str, ...]:
    found = tuple(key.strip() for key in text.split(",") if key.strip())
    if not found:
        raise ValueError("at least one key; leave the setting out to require none")
    return found


def parse_model(text: str) -> Path:
    """Keep "./org/name" distinct from the repository org/name, which Path would not."""
    return Path(text).absolute() if text.startswith(".") else Path(text)


def parse_object(text: str) -> str:
    """Return the text of a JSON object unchanged."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError("a JSON object")
    return text


def parse_rope_overrides(text: str) -> str:
    """Return the text of a JSON object unchanged. It may only contain overridable fields of config.json."""
    found = json.loads(parse_object(text))
    if (unknown := first_unknown(found)) is not None:
        raise ValueError(f"{', '.join(OVERRIDES)}; to change {unknown}, edit config.json in a copy of the folder")
    return text


def parse_prefix(text: str) -> str:
    """Return a path prefix without its trailing "/"."""
    prefix = text.rstrip("/")
    if not re.fullmatch(r"(/[A-Za-z0-9_.~-]{1,64}){0,8}", prefix) or "/." in prefix:
        raise ValueError("a path such as /llm")
    return prefix


def parse_switch(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0"):
        raise ValueError("true or false")
    return text.lower() in ("true", "1")
