"""The parser of `quire`'s verbs and their flags."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator, Sequence
from difflib import get_close_matches
from typing import NoReturn

from service.cli.completion import add_completion_flags
from service.cli.models import add_model_argument
from service.cli.verbs import COMPLETION, HELP, WITHOUT_SETTINGS, load_plain_verb, load_verb
from service.config.settings import BENCH
from service.config.sources import add_flags


class OneLineParser(argparse.ArgumentParser):
    """Parser that reports an error in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def parser_for(words: Sequence[str]) -> argparse.ArgumentParser:
    """Return a parser with the flags of the verb that the arguments choose, imported with it."""
    verb = next((word for word in words if word in HELP), None)
    return make_parser(HELP if verb == COMPLETION else () if verb is None else (verb,))


def make_parser(verbs: Collection[str] = HELP) -> argparse.ArgumentParser:
    """Return the parser of all verbs, with the flags of these."""
    parser = OneLineParser(
        prog="quire",
        description="Serves Llama-family models over HTTP and Redis from a paged KV cache.",
        epilog="Every flag --some-name can be given as QUIRE_SOME_NAME in the environment; the flag wins.",
    )
    parsers = parser.add_subparsers(dest="verb", metavar="VERB")
    for verb, text in HELP.items():
        verb_parser = parsers.add_parser(verb, help=text, description=text, allow_abbrev=False)
        if verb in verbs:
            _add_flags(verb_parser, verb)
    return parser


def _add_flags(parser: argparse.ArgumentParser, verb: str) -> None:
    if verb == COMPLETION:
        add_completion_flags(parser)
    elif verb in WITHOUT_SETTINGS:
        load_plain_verb(verb).add_flags(parser)
    else:
        add_own_flags = load_verb(verb).add_flags
        if add_own_flags is not None:
            add_own_flags(parser)
        if verb != BENCH:  # each bench adds the settings it reads
            add_model_argument(parser)
            add_flags(parser, verb)


def unknown_word(word: str, parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> str:
    """Return the error for `word`, with the most similar flag of the chosen verbs."""
    alike = get_close_matches(word.partition("=")[0], list(_known_flags(parser, chosen)), n=1)
    return f"{word}: unknown argument" + (f" (did you mean {alike[0]}?)" if alike else "")


def _known_flags(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> Iterator[str]:
    for action in parser._actions:
        if not isinstance(action, argparse._SubParsersAction):
            yield from action.option_strings
        elif verb := getattr(chosen, action.dest):
            yield from _known_flags(action.choices[verb], chosen)
