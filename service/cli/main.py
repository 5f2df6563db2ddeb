"""`quire`: command-line verbs, flags and errors."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version

from service.cli.completion import completion_script
from service.cli.lifecycle import REFUSED, STARTED_BY_SERVE
from service.cli.models import take_model_argument, with_model
from service.cli.parser import parser_for, translated, unknown_word
from service.cli.secret_flags import hide_secrets
from service.cli.verbs import COMPLETION, WITHOUT_SETTINGS, load_plain_verb, load_verb
from service.cli.vllm_words import vllm_variables, with_stored_format, with_vllm_key
from service.config.settings import GATEWAY, SERVE, WORKER
from service.config.sources import read_settings
from service.cuda_contexts import create_contexts
from service.errors import StartupError
from service.observability.logs import PROCESS_NAME, setup_logs

log = logging.getLogger("quire.cli")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb. Return 0: done, 1: failed, 2: could not start, 130: interrupted by Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = parser_for(words)
    verb = words[0] if words and not words[0].startswith("-") else None
    try:
        translation = translated(words, parser)
        flags, unknown = parser.parse_known_args(translation.argv)
        if flags.version or unknown == ["--version"]:
            print(f"quire {version('quire')}")
            return 0
        if flags.verb is None and not unknown:
            parser.print_help(sys.stderr)
            return 2
        if unknown:
            raise StartupError(unknown_word(unknown[0], parser, flags))
        warnings = hide_secrets(flags)
        if flags.verb == COMPLETION:
            print(completion_script(parser, flags.shell))
            return 0
        if flags.verb in WITHOUT_SETTINGS:
            return load_plain_verb(flags.verb).run(flags)
        take_model_argument(flags)
        settings = read_settings(flags.verb, flags, os.environ)
        if flags.verb in (SERVE, GATEWAY):
            settings = with_vllm_key(settings, os.environ)
        setup_logs(settings.log_level, os.environ.get(PROCESS_NAME, ""))
        for warning in warnings:
            log.warning("%s", warning)
        for note in translation.notes:
            log.info("%s", note)
        if STARTED_BY_SERVE not in os.environ and (variables := vllm_variables(os.environ)):
            log.info("%s", variables)
        if flags.verb == WORKER and settings.device != "cpu":
            create_contexts(settings.tensor_parallel_size)
        settings = with_stored_format(with_model(settings), translation.stored_format)
        return load_verb(flags.verb).run(settings, flags)
    except BrokenPipeError:  # the reader closed our stdout, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT  # as shells report it
    except StartupError as error:
        if STARTED_BY_SERVE in os.environ:
            print(REFUSED, error, flush=True)
            return 2
        print(f"{' '.join(filter(None, ('quire', verb)))}: {error}", file=sys.stderr)
        return 2
