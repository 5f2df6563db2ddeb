"""Entry point of `quire` and of the processes of `quire serve`.

During imports Ctrl-C kills the process, because a KeyboardInterrupt could be swallowed, and the garbage collector is
off: it would take a tenth of the import time and find nothing.
"""

from __future__ import annotations

import faulthandler
import gc
import io
import signal
import sys

gc.disable()
HANDLES_CTRL_C = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # false after `nohup ... &`
if HANDLES_CTRL_C:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from service.cli.main import main  # noqa: E402
from service.cli.parser import parser_for  # noqa: E402


def run() -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the terminal may lack characters
    faulthandler.enable()  # print every thread's stack on a native crash
    parser_for(sys.argv[1:])  # imports the verb
    gc.freeze()
    gc.enable()
    if HANDLES_CTRL_C:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return main()


if __name__ == "__main__":
    sys.exit(run())
