"""What processes of a group have read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from headgate.processes.reading import bytes_read

_SIZE = 3_000_000
_READER = "import sys; data = open(sys.argv[1], 'rb').read(); print(len(data), flush=True); sys.stdin.read()"


def test_the_bytes_of_a_child_of_the_group_count(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(bytes(_SIZE))
    command = [sys.executable, "-c", _READER, str(tmp_path / "weights")]
    shell = ["sh", "-c", '"$@" & wait', "sh", *command]  # the reader is the group's second process
    with subprocess.Popen(
        shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        try:
            assert int(process.stdout.readline()) == _SIZE
            read = bytes_read(process.pid)
        finally:
            os.killpg(process.pid, 9)
    assert read is not None
    assert read >= _SIZE
    assert bytes_read(2**22 + 1) is None, "no process has this number"
