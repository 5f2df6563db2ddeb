"""`quire`: verbs, flags, and errors of the command line."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import get_close_matches
from typing import NoReturn

from service.bench.command import add_bench_flags, run_bench
from service.cli.check import add_check_flags, run_check
from service.cli.client.talk import add_chat_flags, add_complete_flags, run_chat, run_complete
from service.cli.client.top import add_top_flags, run_top
from service.cli.completion import add_completion_flags, completion_script
from service.cli.dead_letters import add_dead_flags, run_dead
from service.cli.keys import add_key_flags, run_key
from service.cli.models import add_model_argument, take_model_argument, with_model
from service.cli.quantize import add_quantize_flags, run_quantize
from service.cli.roles import gateway_command, worker_command
from service.cli.secret_flags import hide_secrets
from service.cli.serve import serve_command
from service.config.settings import BENCH, VERBS, Settings
from service.config.sources import add_flags, read_settings
from service.errors import StartupError
from service.observability.logs import setup_logs

log = logging.getLogger("quire.cli")

HELP = {
    "serve": "run everything: embedded Redis, one gateway, one worker",
    "gateway": "run a gateway, HTTP and queue producers, on an existing Redis",
    "worker": "run a worker, one model on one device, on an existing Redis",
    "check": "report what fits before loading: weights, blocks, concurrency",
    "bench": "measure the engine, its operations, or a running service",
}

Command = Callable[[Settings, argparse.Namespace], int]


def run_completion(flags: argparse.Namespace) -> int:
    print(completion_script(make_parser(), flags.shell))
    return 0


OTHER_VERBS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]] = {
    "chat": ("chat with the model of a running service", add_chat_flags, run_chat),
    "complete": ("complete a text with the model of a running service", add_complete_flags, run_complete),
    "top": ("watch a running service: requests, tokens, latencies, KV blocks", add_top_flags, run_top),
    "dead": ("list, show and requeue dead letters: jobs that killed engines", add_dead_flags, run_dead),
    "quantize": ("write a model folder in fp8 or int4", add_quantize_flags, run_quantize),
    "completion": ("print a shell completion script", add_completion_flags, run_completion),
    "key": ("make an API key and its line for --api-key-file", add_key_flags, run_key),
}
"""Verbs without settings: help, flags, command."""

COMMANDS: dict[str, Command] = {
    "serve": serve_command,
    "gateway": gateway_command,
    "worker": worker_command,
    "check": run_check,
    "bench": run_bench,
}


class OneLineParser(argparse.ArgumentParser):
    """Parser that reports an error in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all verbs and their settings."""
    parser = OneLineParser(
        prog="quire",
        description="Serves Llama-family models over HTTP and Redis from a paged KV cache.",
        epilog="Every flag --some-name can be given as QUIRE_SOME_NAME in the environment; the flag wins.",
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")
    extra = {"check": add_check_flags, "bench": add_bench_flags}
    for verb in VERBS:
        verb_parser = verbs.add_parser(verb, help=HELP[verb], description=HELP[verb], allow_abbrev=False)
        if verb in extra:
            extra[verb](verb_parser)
        if verb != BENCH:  # each bench adds the settings it reads
            add_model_argument(verb_parser)
            add_flags(verb_parser, verb)
    for verb, (help, add_verb_flags, _) in OTHER_VERBS.items():
        add_verb_flags(verbs.add_parser(verb, help=help, description=help, allow_abbrev=False))
    return parser


def _known_flags(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> Iterator[str]:
    """Yield the flags of the chosen verbs."""
    for action in parser._actions:
        if not isinstance(action, argparse._SubParsersAction):
            yield from action.option_strings
        elif verb := getattr(chosen, action.dest):
            yield from _known_flags(action.choices[verb], chosen)


def _unknown_word(word: str, known: Iterable[str]) -> str:
    """Return the error for `word`, with the most similar known flag."""
    alike = get_close_matches(word.partition("=")[0], list(known), n=1)
    return f"{word}: unknown argument" + (f" (did you mean {alike[0]}?)" if alike else "")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb. Return 0: done, 1: failed, 2: could not start, 130: interrupted by Ctrl-C."""
    parser = make_parser()
    flags, unknown = parser.parse_known_args(argv)
    if flags.verb is None and not unknown:
        parser.print_help(sys.stderr)
        return 2
    try:
        if unknown:
            raise StartupError(_unknown_word(unknown[0], _known_flags(parser, flags)))
        warnings = hide_secrets(flags)
        if flags.verb in OTHER_VERBS:
            return OTHER_VERBS[flags.verb][2](flags)
        take_model_argument(flags)
        settings = read_settings(flags.verb, flags, os.environ)
        setup_logs(settings.log_level)
        for warning in warnings:
            log.warning("%s", warning)
        settings = with_model(settings)
        return COMMANDS[flags.verb](settings, flags)
    except BrokenPipeError:  # the reader of our stdout has closed it, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT  # a shell's status for it
    except StartupError as error:
        print(f"{' '.join(filter(None, ('quire', flags.verb)))}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
