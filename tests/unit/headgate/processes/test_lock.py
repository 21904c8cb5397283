"""A lock of one process: who holds it, and when it is free again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headgate.processes.lock import LockHeld, holder, lock

HOLDER = """
import sys
from pathlib import Path
from headgate.processes.lock import lock
with lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_the_second_is_refused_with_the_process_that_holds_it_and_death_frees_it(tmp_path: Path) -> None:
    path = tmp_path / "run" / "gateway.db.lock"
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        with pytest.raises(LockHeld) as error, lock(path):
            pass
        assert error.value.process == holder(path) == str(child.pid)
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()
    assert holder(path) == ""
    assert holder(tmp_path / "none.lock") == ""
    for _ in range(2):
        with lock(path):
            assert path.read_text() == f"{os.getpid()}\n"
