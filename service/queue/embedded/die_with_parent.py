"""Termination of a child process with its parent. As a script, it becomes the given command: python -I -S
die_with_parent.py <parent's pid> <program> <argument>..."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(number: int = signal.SIGTERM) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def main() -> None:
    parent, program = int(sys.argv[1]), sys.argv[2]
    die_with_parent()
    if os.getppid() != parent:
        sys.exit(1)
    os.execv(program, sys.argv[2:])


if __name__ == "__main__":
    main()
