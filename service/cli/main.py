"""`quire`: the verbs, their flags, and what a wrong word on the command line gets."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

from service.bench.command import add_bench_flags, run_bench
from service.cli.check import add_check_flags, run_check
from service.cli.client.talk import add_chat_flags, add_complete_flags, run_chat, run_complete
from service.cli.client.top import add_top_flags, run_top
from service.cli.completion import add_completion_flags, completion_script
from service.cli.dead_letters import add_dead_flags, run_dead
from service.cli.keys import add_key_flags, run_key
from service.cli.roles import gateway_command, worker_command
from service.cli.secret_flags import hide_secrets
from service.cli.serve import serve_command
from service.config.settings import BENCH, VERBS, Settings
from service.config.sources import add_flags, read_settings
from service.errors import StartupError
from service.observability.logs import setup_logs

log = logging.getLogger("quire.cli")

DEMO_MODEL = Path(__file__).resolve().parents[2] / "model" / "demo"

HELP = {
    "serve": "everything in one process group: embedded Redis, one gateway, one worker",
    "gateway": "the HTTP door and the queue door, on an existing Redis",
    "worker": "one model on one device, on an existing Redis",
    "check": "say before loading what fits: weights, blocks, concurrency",
    "bench": "measure the engine, its operations, or a running service",
}

Command = Callable[[Settings, argparse.Namespace], int]


def run_completion(flags: argparse.Namespace) -> int:
    print(completion_script(make_parser(), flags.shell))
    return 0


OTHER_VERBS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]] = {
    "chat": ("talk with the model of a running service", add_chat_flags, run_chat),
    "complete": ("let the model of a running service go on with a text", add_complete_flags, run_complete),
    "top": ("watch a running service: requests, tokens, latencies, KV blocks", add_top_flags, run_top),
    "dead": ("jobs that were given up because engines died of them: list, show, requeue", add_dead_flags, run_dead),
    "completion": ("print what lets a shell complete these words", add_completion_flags, run_completion),
    "key": ("make an API key and its line for --api-key-file", add_key_flags, run_key),
}
"""Verbs that read no settings: help, flags, command."""

COMMANDS: dict[str, Command] = {
    "serve": serve_command,
    "gateway": gateway_command,
    "worker": worker_command,
    "check": run_check,
    "bench": run_bench,
}


class OneLineParser(argparse.ArgumentParser):
    """Says in one line what is wrong; the usage is what --help is for."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def make_parser() -> argparse.ArgumentParser:
    """The whole command line; each verb's help lists its settings with defaults and units."""
    parser = OneLineParser(
        prog="quire",
        description="Serves Llama-family models over HTTP and Redis from a paged KV cache.",
        epilog="Every flag --some-name can be given as QUIRE_SOME_NAME in the environment; the flag wins.",
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")
    extra = {"check": add_check_flags, "bench": add_bench_flags}
    for verb in VERBS:
        verb_parser = verbs.add_parser(verb, help=HELP[verb], description=HELP[verb], allow_abbrev=False)
        extra.get(verb, lambda parser: None)(verb_parser)
        if verb != BENCH:  # each of its benches lists the settings it reads
            add_flags(verb_parser, verb)
    for verb, (help, add_verb_flags, _) in OTHER_VERBS.items():
        add_verb_flags(verbs.add_parser(verb, help=help, description=help, allow_abbrev=False))
    return parser


def _flags_of(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> Iterator[str]:
    """The flags that may stand behind the verbs that were chosen."""
    for action in parser._actions:
        if not isinstance(action, argparse._SubParsersAction):
            yield from action.option_strings
        elif verb := getattr(chosen, action.dest):
            yield from _flags_of(action.choices[verb], chosen)


def _not_known(word: str, known: Iterable[str]) -> str:
    """What to say of a word that none of the `known` flags is."""
    alike = get_close_matches(word.partition("=")[0], list(known), n=1)
    return f"{word} is not known here" + (f"; {alike[0]} is" if alike else "")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb. 0: done, 1: it failed while running, 2: it could not start as asked, 130: Ctrl-C broke it off."""
    parser = make_parser()
    flags, unknown = parser.parse_known_args(argv)
    if flags.verb is None and not unknown:
        parser.print_help(sys.stderr)
        return 2
    try:
        if unknown:
            raise StartupError(_not_known(unknown[0], _flags_of(parser, flags)))
        warnings = hide_secrets(flags)
        if flags.verb in OTHER_VERBS:
            return OTHER_VERBS[flags.verb][2](flags)
        settings = read_settings(flags.verb, flags, os.environ)
        if settings.model is None:
            settings = replace(settings, model=DEMO_MODEL)
        if flags.verb != BENCH and not settings.model.is_dir():
            raise StartupError(f"--model: {settings.model} is no folder on this machine; nothing is downloaded")
        setup_logs(settings.log_level)
        for warning in warnings:
            log.warning("%s", warning)
        return COMMANDS[flags.verb](settings, flags)
    except BrokenPipeError:  # the reader of our output has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT  # as a shell says it of who ends by Ctrl-C
    except StartupError as error:
        print(f"{' '.join(filter(None, ('quire', flags.verb)))}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
