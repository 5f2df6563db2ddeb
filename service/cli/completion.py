"""`quire completion`: a shell script that completes verbs, flags and values."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import shtab

SHELLS = ("bash", "zsh", "fish")
_PATHS = {"FILE": shtab.FILE, "DIR": shtab.DIRECTORY, "MODEL": shtab.DIRECTORY}
"""Completion by metavar."""


def add_completion_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help='shell that the script is for: eval "$(quire completion bash)"')


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the script. Modifies `parser`, which cannot parse afterwards."""
    for action in _actions(parser):
        metavar = action.metavar if isinstance(action.metavar, str) else ""
        if metavar in _PATHS:
            action.complete = _PATHS[metavar]  # type: ignore[attr-defined]  # shtab reads this attribute
        elif metavar.startswith("{") and action.choices is None:
            action.choices = metavar[1:-1].split(",")
    return shtab.complete(parser, shell)


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _actions(inner)
