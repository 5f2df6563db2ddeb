"""Where settings come from: flags, the environment, a file, defaults; and back to flags, for the parts of a service."""

from __future__ import annotations

import argparse
import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from service.config.settings import Settings
from service.config.values import switch
from service.errors import StartupError

CONFIG = "config"
WITHOUT_FILE = {"QUIRE_CONFIG": ""}
"""Environment for a part: its parent has read the file."""

RESERVED_VARIABLES = frozenset({"QUIRE_CACHE_DIR", "QUIRE_CONFIG", "QUIRE_URL"})
"""Variables that are no settings: where compiled kernels are kept is the machine's business, and where a
service is that of the verbs that talk to one."""

_SECRETS = ("api_key", "redis_url")
"""A Redis URL may hold a password."""

_GUARDS = ("api_key", "api_key_file")
"""Who sets them wants nobody else to enter: an empty variable is a mistake here, where of others it counts as none."""


def add_flags(parser: argparse.ArgumentParser, verb: str) -> None:
    """Give `parser` the flags of one verb. They default to None, so that `read_settings` can tell what was given."""
    parser.add_argument(
        _flag(CONFIG), metavar="FILE", help="TOML file of settings, named as here but with '_'; without it none is read"
    )
    for field in _fields(verb):
        metadata = field.metadata
        default = "" if field.default in (None, ()) else f" (default: {_shown(field.default)})"
        parser.add_argument(
            _flag(field.name),
            metavar="{" + ",".join(map(str, metadata["choices"])) + "}" if metadata["choices"] else _metavar(field),
            help=(metadata["help"] + default).replace("%", "%%"),
            **({"nargs": "?", "const": "true"} if metadata["parse"] is switch else {}),
        )
        if metadata["parse"] is switch:
            off = f"--no-{_flag(field.name)[2:]}"
            parser.add_argument(off, dest=field.name, action="store_const", const="false", help="turns it off")


def read_settings(verb: str, flags: argparse.Namespace, environ: Mapping[str, str]) -> Settings:
    """Flags over environment over the file over defaults. Raises StartupError with one line that names the wrong."""
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
    """The settings of a file, worded as flags would be. Those of other verbs may stand there too."""
    try:
        with open(path, "rb") as file:
            lines = tomllib.load(file)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise StartupError(f"--config: {path}: {reason}") from None
    unknown = sorted(lines.keys() - {field.name for field in dataclasses.fields(Settings)})
    if unknown:
        raise StartupError(f"--config: {path}: {unknown[0]} is no setting")
    switches = {field.name for field in dataclasses.fields(Settings) if field.metadata["parse"] is switch}
    return {
        name: str(value) if name in switches and isinstance(value, bool) else _worded(name, value, path)
        for name, value in lines.items()
    }


def _worded(name: str, value: Any, path: str) -> str:
    items = value if isinstance(value, list) else [value]
    if any(isinstance(item, bool) or not isinstance(item, str | int | float) for item in items):
        raise StartupError(f"--config: {path}: {name}: a text, a number or a list of texts is wanted")
    return _shown(tuple(map(str, items)))


def flags_of(settings: Settings, verb: str) -> list[str]:
    """The flags that make `verb` read these same settings; how `serve` starts its parts. Defaults are spelled out too:
    a part sees the same environment, and a flag that chose the default must still win over it."""
    values = {field.name: getattr(settings, field.name) for field in _fields(verb) if field.name not in _SECRETS}
    return [f"{_flag(name)}={_shown(value)}" for name, value in values.items() if value is not None]


def secrets_of(settings: Settings) -> dict[str, str]:
    """Environment for what must not stand on a command line, where every user of the machine can read it. A part takes
    it together with `flags_of` and WITHOUT_FILE."""
    values = {name: _shown(getattr(settings, name) or "") for name in _SECRETS}
    return {_variable(name): text for name, text in values.items() if text or name not in _GUARDS}


def _fields(verb: str) -> list[dataclasses.Field]:
    return [field for field in dataclasses.fields(Settings) if verb in field.metadata["verbs"]]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _variable(name: str) -> str:
    return "QUIRE_" + name.upper()


def _metavar(field: dataclasses.Field) -> str:
    if field.metadata["parse"] is Path:
        return "FILE" if field.name.endswith("file") else "DIR"
    return {int: "N", float: "X"}.get(field.metadata["parse"], "TEXT")


def _shown(value: Any) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _checked(field: dataclasses.Field, text: str, source: str) -> Any:
    metadata = field.metadata
    if not text and metadata["parse"] in (str, Path):
        raise StartupError(f"{source}: is empty")
    try:
        value = metadata["parse"](text)
    except ValueError as error:
        wanted = {int: "a whole number", float: "a number"}.get(metadata["parse"], str(error))
        raise StartupError(f"{source}: {text!r} is not accepted: {wanted}") from None
    if metadata["choices"] and value not in metadata["choices"]:
        raise StartupError(f"{source}: {text!r} is none of {', '.join(map(str, metadata['choices']))}")
    low, high = metadata["low"], metadata["high"]
    if low is not None and not low <= value <= high:
        raise StartupError(f"{source}: {text} is outside {low}..{high}" if low < high else f"{source}: must be {low}")
    return value
