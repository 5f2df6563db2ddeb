"""`quire completion`: what lets a shell complete verbs, flags and values, from the same parser that reads them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import shtab

SHELLS = ("bash", "zsh", "fish")
_PATHS = {"FILE": shtab.FILE, "DIR": shtab.DIRECTORY}
"""How flags name what they take."""


def add_completion_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="whose words the script speaks; the README says where it goes")


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script for `parser`, which is not to be used for reading flags any more."""
    for action in _actions(parser):
        metavar = action.metavar if isinstance(action.metavar, str) else ""
        if metavar in _PATHS:
            action.complete = _PATHS[metavar]
        elif metavar.startswith("{") and action.choices is None:
            action.choices = metavar[1:-1].split(",")
    return shtab.complete(parser, shell)


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _actions(inner)
