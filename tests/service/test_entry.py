"""The command's entry point."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys

import pytest

from tests.support.served import REPOSITORY

BEGIN = "from service.cli.entry import run; raise SystemExit(run())"


@pytest.mark.parametrize("last_import", ["argparse", "numpy", "asyncio"])
def test_ctrl_c_among_the_imports_ends_it_without_a_word(last_import):
    """Each is printed, 70 kB in all, to a pipe that holds 4: nothing continues until it is read."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    command = [sys.executable, "-X", "importtime", "-c", BEGIN, "completion", "bash"]
    process = subprocess.Popen(command, cwd=REPOSITORY, stderr=writing, stdout=subprocess.PIPE, text=True)
    os.close(writing)
    with process, open(reading, encoding="utf-8") as received:
        assert next(line for line in received if line.rpartition("|")[2].strip() == last_import)
        process.send_signal(signal.SIGINT)
        assert "KeyboardInterrupt" not in received.read()
        assert process.stdout.read() == ""
    assert process.returncode == -signal.SIGINT


def test_behind_them_it_is_a_keyboard_interrupt_again_and_garbage_is_collected():
    heard = "import gc, signal, service.cli.main as m; "
    heard += "m.main = lambda: print(signal.getsignal(signal.SIGINT), gc.isenabled()); "
    command = [sys.executable, "-c", heard + BEGIN]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True)
    assert "default_int_handler" in done.stdout
    assert done.stdout.endswith(" True\n")


@pytest.mark.parametrize(("redirection", "received"), [("", "caf?\n"), (">&-", "")])
def test_a_terminal_that_does_not_know_a_character_and_none_at_all_end_nothing(redirection, received):
    printing = "import service.cli.main as m; m.main = lambda: print('café'); "
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-c", printing + BEGIN],
        cwd=REPOSITORY, env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == (received, "")
