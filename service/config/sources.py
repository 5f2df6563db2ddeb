"""Reads settings from flags, environment, file and defaults; turns them back into flags for child processes."""

from __future__ import annotations

import argparse
import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from service.config.settings import Settings
from service.config.values import parse_model, parse_switch
from service.errors import StartupError

CONFIG = "config"
NO_CONFIG_FILE = {"QUIRE_CONFIG": ""}
"""Environment of a child process, whose parent has already read the file."""

RESERVED_VARIABLES = frozenset(
    {
        "QUIRE_CACHE_DIR",
        "QUIRE_CONFIG",
        "QUIRE_GATEWAY_GROUP",
        "QUIRE_PROCESS_NAME",
        "QUIRE_STARTED_BY_SERVE",
        "QUIRE_URL",
    }
)
"""QUIRE_ variables that are not settings. They belong to the kernel cache, settings file, clients and parent process.
"""

_SECRETS = ("api_key", "redis_url")
"""A Redis URL may contain a password."""

_GUARDS = ("api_key", "api_key_file")
"""Settings for which an empty variable is an error, since without them every client is admitted."""


def add_flags(parser: argparse.ArgumentParser, verb: str) -> None:
    """Add the flags of `verb`. They default to None, to show which were given."""
    parser.add_argument(
        _flag(CONFIG), metavar="FILE", help="TOML file of settings, named as the flags but with '_' (default: none)"
    )
    for field in _fields(verb):
        metadata, is_switch = field.metadata, field.metadata["parse"] is parse_switch
        default = "" if field.default in (None, ()) else f" (default: {_as_text(field.default)})"
        parser.add_argument(
            _flag(field.name),
            metavar="{" + ",".join(map(str, metadata["choices"])) + "}" if metadata["choices"] else _metavar(field),
            help=(metadata["help"] + default).replace("%", "%%"),
            nargs="?" if is_switch else None,
            const="true" if is_switch else None,
        )
        if is_switch:
            off = f"--no-{_flag(field.name)[2:]}"
            parser.add_argument(
                off, dest=field.name, action="store_const", const="false", help=f"turn {_flag(field.name)} off"
            )


def read_settings(verb: str, flags: argparse.Namespace, environ: Mapping[str, str]) -> Settings:
    """Return the settings of `verb`. Raises StartupError for an invalid value or unknown variable."""
    known = {_variable(field.name) for field in dataclasses.fields(Settings)}
    unknown = sorted(name for name in environ if name.startswith("QUIRE_") and name not in known | RESERVED_VARIABLES)
    if unknown:
        raise StartupError(f"unknown environment variable {unknown[0]}")
    path = getattr(flags, CONFIG, None) or environ.get(_variable(CONFIG))
    lines = _file_lines(path) if path else {}
    values = {}
    for field in _fields(verb):
        text, source = getattr(flags, field.name), _flag(field.name)
        if text is None:
            text, source = environ.get(_variable(field.name)), _variable(field.name)
            text = text if text or field.name in _GUARDS else None
        if text is None:
            text, source = lines.get(field.name), f"{path}: {field.name}"
        if text is not None:
            values[field.name] = _checked(field, text, source)
    return Settings(**values)


def _file_lines(path: str) -> dict[str, str]:
    try:
        with open(path, "rb") as file:
            lines = tomllib.load(file)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise StartupError(f"--config: {path}: {reason}") from None
    unknown = sorted(lines.keys() - {field.name for field in dataclasses.fields(Settings)})
    if unknown:
        raise StartupError(f"--config: {path}: {unknown[0]}: unknown setting")
    switches = {field.name for field in dataclasses.fields(Settings) if field.metadata["parse"] is parse_switch}
    return {
        name: str(value) if name in switches and isinstance(value, bool) else _file_value(name, value, path)
        for name, value in lines.items()
    }


def _file_value(name: str, value: Any, path: str) -> str:
    items = value if isinstance(value, list) else [value]
    if any(isinstance(item, bool) or not isinstance(item, str | int | float) for item in items):
        raise StartupError(f"--config: {path}: {name}: wrong type (a text, a number or a list of texts)")
    return _as_text(tuple(map(str, items)))


def to_flags(settings: Settings, verb: str) -> list[str]:
    """Return flags from which `verb` reads these settings. Defaults are included, to override the environment."""
    values = {field.name: getattr(settings, field.name) for field in _fields(verb) if field.name not in _SECRETS}
    return [f"{_flag(name)}={_as_text(value)}" for name, value in values.items() if value is not None]


def to_secret_environ(settings: Settings) -> dict[str, str]:
    """Return the secret settings as environment variables, because other users can read command lines."""
    values = {name: _as_text(getattr(settings, name) or "") for name in _SECRETS}
    return {_variable(name): text for name, text in values.items() if text or name not in _GUARDS}


def _fields(verb: str) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(Settings) if verb in field.metadata["verbs"]]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _variable(name: str) -> str:
    return "QUIRE_" + name.upper()


def _metavar(field: dataclasses.Field[Any]) -> str:
    if field.metadata["parse"] is parse_model:
        return "MODEL"
    if field.metadata["parse"] is Path:
        return "FILE" if field.name.endswith("file") else "DIR"
    return {int: "N", float: "X"}.get(field.metadata["parse"], "TEXT")


def _as_text(value: Any) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _checked(field: dataclasses.Field[Any], text: str, source: str) -> Any:
    metadata = field.metadata
    if not text and metadata["parse"] in (str, Path, parse_model):
        raise StartupError(f"{source}: empty value")
    try:
        value = metadata["parse"](text)
    except ValueError as error:
        allowed = {int: "a whole number", float: "a number"}.get(metadata["parse"], str(error))
        raise StartupError(f"{source}: {text!r} is not supported ({allowed})") from None
    if metadata["choices"] and value not in metadata["choices"]:
        raise StartupError(f"{source}: {text!r} is not supported ({', '.join(map(str, metadata['choices']))})")
    low, high = metadata["low"], metadata["high"]
    if low is not None and not low <= value <= high:
        raise StartupError(
            f"{source}: {text} is out of range ({low}..{high})" if low < high else f"{source}: must be {low}"
        )
    return value
