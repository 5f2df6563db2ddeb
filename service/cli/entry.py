"""Where the `quire` command begins. Until its imports are done, which takes half a second, Ctrl-C just ends it: what it
raises in them is a traceback, and is lost where Python cannot be disturbed, so that a service starts all the same."""

from __future__ import annotations

import signal
import sys

HEARS_CTRL_C = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not, for one, behind `nohup ... &`
if HEARS_CTRL_C:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from service.cli.main import main  # noqa: E402


def run() -> int:
    if sys.stdout is not None:
        sys.stdout.reconfigure(errors="replace")  # not every terminal knows every character of a model's text
    if HEARS_CTRL_C:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return main()
