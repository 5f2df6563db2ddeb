"""vLLM's `--config FILE.yaml`: flags and values as command-line words."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from service.errors import StartupError

ENDINGS = (".yaml", ".yml")


def with_yaml_files(argv: Sequence[str]) -> list[str]:
    """Insert the YAML files' words before the others, so that flags override files. Raises StartupError."""
    rest = list(argv)
    words: list[str] = []
    of_files: list[str] = []
    while rest:
        word = rest.pop(0)
        flag, equals, path = word.partition("=")
        if word == "--":
            words += [word, *rest]
            break
        if flag == "--config" and not equals and rest:
            path = rest[0]
        if flag == "--config" and path.endswith(ENDINGS):
            of_files += _words(path)
            del rest[: 0 if equals else 1]
        else:
            words.append(word)
    return of_files + words


def _words(path: str) -> Iterator[str]:
    try:
        with open(path, encoding="utf-8") as file:
            found = yaml.safe_load(file)
    except OSError as error:
        raise StartupError(f"--config: {path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:  # ValueError: an invalid date or UTF-8
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1})" if mark is not None else ""
        raise StartupError(f"--config: {path}: no valid YAML{where}") from None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise StartupError(f"--config: {path}: wrong form (lines of `flag: value`)")
    for name, value in found.items():
        if isinstance(value, list):
            yield from (f"--{name}", *(_text(each, path, name) for each in value))
        elif value is not None:
            yield f"--{name}={_text(value, path, name)}"


def _text(value: Any, path: str, name: str) -> str:
    try:
        return value if isinstance(value, str) else json.dumps(value, default=str)
    except (ValueError, TypeError, RecursionError):  # a self-referencing alias, or a key that JSON does not allow
        raise StartupError(f"--config: {path}: {name}: wrong form (a value as in JSON)") from None
