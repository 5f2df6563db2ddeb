"""`quire key`: make an API key and its line for --api-key-file."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from service.errors import StartupError
from service.gateway.http.auth import line_of, make_key, read_keys


def add_key_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="name of the key's owner; several keys may share it")
    parser.add_argument("--tenant", metavar="NAME", help="tenant of the key's requests (default: the key's NAME)")
    parser.add_argument("--max-open", type=int, metavar="N", help="max open requests (default: --max-open-per-key)")
    parser.add_argument(
        "--file", type=Path, metavar="FILE", help="--api-key-file to append to (default: print the line)"
    )


def run_key(flags: argparse.Namespace) -> int:
    """Print the key, which is not stored, and without --file its line."""
    key = make_key()
    try:
        line = line_of(key, flags.name, flags.tenant, flags.max_open)
    except ValueError as error:
        raise StartupError(str(error)) from None
    if flags.file is None:
        print(f"{key}\n{line}")
        return 0
    _append(flags.file, line)
    print(key)
    return 0


def _append(path: Path, line: str) -> None:
    """Append to a key file; a new file has mode 0600. Raises StartupError."""
    if path.exists():
        read_keys(path)
    try:
        with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "rb+") as file:
            text = file.read()
            file.write((b"" if text.endswith(b"\n") or not text else b"\n") + line.encode() + b"\n")
    except OSError as error:
        raise StartupError(f"--file: {path}: {error.strerror}") from None
