"""Hides secret flags in the process list, which every user of the host can read.

They are visible for about a second after start; a file or variable never is.
"""

from __future__ import annotations

import argparse
import ctypes
from pathlib import Path

SECRET_FLAGS = {
    "api_key": "--api-key-file or QUIRE_API_KEY",
    "shown_key": "QUIRE_API_KEY",
    "redis_url": "--redis-password-file or QUIRE_REDIS_URL",
}
"""Safer alternatives to secret flags."""

ARG_START, ARG_END = 45, 46
"""Indices of fields 48 and 49 of /proc/self/stat, counted after the command's name."""


def hide_secrets(flags: argparse.Namespace) -> list[str]:
    """Overwrite secret arguments with asterisks (Linux only). Return a warning for each."""
    texts = {name: getattr(flags, name, None) for name in SECRET_FLAGS}
    secrets = {name: text for name, text in texts.items() if text and (name != "redis_url" or has_password(text))}
    if secrets:
        given = {word for text in secrets.values() for word in (text, *text.split(","))}  # may contain several keys
        _overwrite({word.encode("utf-8", "surrogateescape") for word in given if word})
    return [
        f"--{name.replace('_', '-')}: other users of this host could read it in the process list "
        f"(use {SECRET_FLAGS[name]})"
        for name in secrets
    ]


def has_password(url: str) -> bool:
    rest = url.partition("://")[2]
    return ":" in rest.rpartition("@")[0] or "password=" in rest


def _overwrite(secrets: set[bytes]) -> None:
    try:
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        start, end = int(fields[ARG_START]), int(fields[ARG_END])
    except (OSError, IndexError, ValueError):  # not Linux, or /proc is missing
        return
    if not 0 < start < end:
        return
    position = start
    for argument in ctypes.string_at(start, end - start).split(b"\0"):
        value = argument.partition(b"=")[2] if argument.startswith(b"--") else argument
        if value in secrets:
            ctypes.memset(position + len(argument) - len(value), ord("*"), len(value))
        position += len(argument) + 1
