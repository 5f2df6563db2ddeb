"""Parser of `quire`'s verbs and flags."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator, Sequence
from difflib import get_close_matches
from typing import NoReturn

from service.cli.completion import add_completion_flags
from service.cli.help import SectionHelp
from service.cli.models import add_model_argument
from service.cli.verbs import COMPLETION, HELP, WITH_SETTINGS, WITHOUT_SETTINGS, load_plain_verb, load_verb
from service.cli.vllm_flags import VLLM_FLAGS
from service.cli.vllm_words import Translation, translate
from service.config.settings import BENCH, Settings
from service.config.sources import add_flags

MODEL_VERBS = tuple(verb for verb in WITH_SETTINGS if verb != BENCH)
"""Verbs that take a model and accept vLLM's flags."""

SHORT_FLAGS = {"-tp": "--tensor-parallel-size"}
"""vLLM's short flags that `bench` accepts; its other flags are its own."""

TYPO_RATIO = 0.75
"""difflib similarity (0 to 1) above which a flag counts as a misspelling of another."""


class OneLineParser(argparse.ArgumentParser):
    """Parser that reports an error on one line, without usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def parser_for(words: Sequence[str]) -> argparse.ArgumentParser:
    """Return a parser with the flags of the verb in `words`; the verb is imported."""
    verb = next((word for word in words if word in HELP), None)
    return make_parser(HELP if verb == COMPLETION else () if verb is None else (verb,))


def make_parser(verbs: Collection[str] = HELP) -> argparse.ArgumentParser:
    """Return the parser of all verbs, with flags for `verbs` only."""
    parser = OneLineParser(
        prog="quire",
        description="Serves Llama-family models over HTTP and Redis from a paged KV cache.",
        epilog="Every flag --some-name can be given as QUIRE_SOME_NAME in the environment; the flag wins.",
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    parsers = parser.add_subparsers(dest="verb", metavar="VERB")
    for verb, text in HELP.items():
        has_sections = verb in MODEL_VERBS
        verb_parser = parsers.add_parser(
            verb, help=text, description=text, allow_abbrev=False, add_help=not has_sections
        )
        if has_sections:
            verb_parser.add_argument("-h", "--help", action=SectionHelp)
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
        if verb in MODEL_VERBS:  # each bench adds the settings it reads
            add_model_argument(parser)
            add_flags(parser, verb)


def translated(words: Sequence[str], parser: argparse.ArgumentParser) -> Translation:
    """Translate a command line from vLLM's flags, which verbs that take a model accept. Raises StartupError."""
    if words and words[0] == BENCH:
        return Translation([SHORT_FLAGS.get(word, word) for word in words])
    if not words or words[0] not in MODEL_VERBS:
        return Translation(list(words))
    (verbs,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    translation = translate(words[1:], verbs.choices[words[0]]._option_string_actions)
    translation.argv.insert(0, words[0])
    return translation


def unknown_word(word: str, parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> str:
    """Return the error for `word`, suggesting the most similar flag."""
    flag = word.partition("=")[0]
    name = flag.partition(".")[0][2:].removeprefix("no-").replace("-", "_")
    if chosen.verb in MODEL_VERBS and (setting := Settings.__dataclass_fields__.get(name)) is not None:
        return f"{flag}: not a flag of quire {chosen.verb} (of {', '.join(sorted(setting.metadata['verbs']))})"
    known = [*_known_flags(parser, chosen)]
    notes = [f"--{name}" for name, flag in VLLM_FLAGS.items() if flag.note] if chosen.verb in MODEL_VERBS else []
    alike = _completed(flag, known) or _corrected(flag, known) or _corrected(flag, notes)
    return f"{word}: unknown argument" + (f" (did you mean {alike}?)" if alike else "")


def _corrected(flag: str, known: Sequence[str]) -> str | None:
    names = {each.lstrip("-"): each for each in known}
    alike = get_close_matches(flag.lstrip("-"), names, n=1, cutoff=TYPO_RATIO)
    return names[alike[0]] if alike else None


def _completed(flag: str, known: Sequence[str]) -> str | None:
    """Return the flag that `flag` abbreviates, like --gpu-mem-util or --max-len."""
    parts = flag.lstrip("-").split("-")
    alike = get_close_matches(flag, [each for each in known if _begins_words(parts, each)], n=1, cutoff=0)
    return alike[0] if alike else None


def _begins_words(parts: Sequence[str], flag: str) -> bool:
    """Return whether the parts begin words of the flag, in order."""
    rest = iter(flag.lstrip("-").split("-"))
    return all(len(part) > 1 and any(word.startswith(part) for word in rest) for part in parts)


def _known_flags(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> Iterator[str]:
    for action in parser._actions:
        if not isinstance(action, argparse._SubParsersAction):
            yield from action.option_strings
        elif verb := getattr(chosen, action.dest):
            yield from _known_flags(action.choices[verb], chosen)
