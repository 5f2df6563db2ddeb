"""What settings are made of that are neither numbers nor plain texts. Each raises ValueError with what is wanted."""

from __future__ import annotations

import re


def name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", text):
        raise ValueError("a name is made of letters, digits, '.', '_' and '-', 64 at most")
    return text


def names(text: str) -> tuple[str, ...]:
    found = tuple(name.strip() for name in text.split(",") if name.strip())
    if not all(re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name) for name in found):
        raise ValueError("names are made of letters, digits, '.', '_' and '-', 64 at most")
    return found


def hosts(text: str) -> tuple[str, ...]:
    found = tuple(host.strip().lower() for host in text.split(",") if host.strip())
    if not all(re.fullmatch(r"\*|(\*\.)?[a-z0-9_.-]{1,253}|\[?[0-9a-f:.]+\]?", host) for host in found):
        raise ValueError("hosts are names, addresses, *.some.domain or *, without a port")
    return found


def keys(text: str) -> tuple[str, ...]:
    found = tuple(key.strip() for key in text.split(",") if key.strip())
    if not found:
        raise ValueError("no key stands there; to let everybody in, leave the setting out")
    return found


def switch(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0"):
        raise ValueError("true or false")
    return text.lower() in ("true", "1")
