"""Becomes a program that ends when the process that started it does: `python -I -S dependent.py PARENT PROGRAM ARGUMENT...`.

The kernel sends SIGTERM when the parent dies (PR_SET_PDEATHSIG), which holds for the program too. A function between
fork and exec could set the same, but not safely in a parent with threads. Imports nothing that starts slowly.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def become(parent: int, argv: list[str]) -> None:
    """Return only if the program cannot be started, with status 126 as shells do."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before, and the kernel will send nothing
        sys.exit(128 + signal.SIGTERM)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.stderr.write(f"{argv[0]}: {error.strerror}\n")
        sys.exit(126)


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2:])
