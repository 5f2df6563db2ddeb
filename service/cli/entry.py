"""Entry point of the `quire` command. During its imports (half a second) Ctrl-C ends the process at once: a
KeyboardInterrupt there is a traceback, or is swallowed and the service starts anyway."""

from __future__ import annotations

import io
import signal
import sys

HANDLES_CTRL_C = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # false after `nohup ... &`
if HANDLES_CTRL_C:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from service.cli.main import main  # noqa: E402


def run() -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal's encoding may lack characters of a model's text
    if HANDLES_CTRL_C:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return main()
