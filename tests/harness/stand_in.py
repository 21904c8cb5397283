"""A stand-in: the process that a launcher starts while a test forks the program itself. It ends as the program does.

Imported as Python starts, in whatever the launcher starts: the standard library alone.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from types import FrameType

ADDRESS = "TESTS_FORKS"
"""The variable that names the socket of the test, which forks. Engines see it too, as they see none that is headgate's own."""
FORKED = (
    *("gateway.cli", "gateway.engines.fake", "scheduler.cli", "trainer.cli", "bench.gpu.alone"),
    *("trainer.evaluation.child", "tests.gpu.rank"),
)


def stand_in() -> None:
    """End as the program does that is forked for this process's command line; return if that is not among `FORKED`."""
    line = sys.orig_argv
    at = line.index("-m") + 1 if "-m" in line else len(line)
    if ADDRESS not in os.environ or line[at : at + 1] not in [[module] for module in FORKED]:
        return
    start = {"module": line[at], "arguments": line[at + 1 :], "folder": os.getcwd(), "pid": os.getpid()}
    with socket.socket(socket.AF_UNIX) as test, test.makefile("rw") as talk:
        test.connect("\0" + os.environ[ADDRESS])
        talk.write(json.dumps(start | {"environ": dict(os.environ)}) + "\n")
        talk.flush()
        pid = int(talk.readline())

        def pass_on(number: int, _: FrameType | None) -> None:
            os.kill(pid, number)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, pass_on)
        status = int(talk.readline())
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
        os.kill(os.getpid(), -status)
    os._exit(status)
