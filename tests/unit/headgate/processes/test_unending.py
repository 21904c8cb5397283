"""A program ends with its status although foreign code in it leaves a task or a thread that does not end."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, sys, time
from headgate.processes.unending import Program

async def stubborn():
    while True:
        try:
            await asyncio.Event().wait()
        except BaseException:
            pass

async def main():
    if "task" in sys.argv:
        sys.stubborn = asyncio.create_task(stubborn())
    if "thread" in sys.argv:
        asyncio.get_running_loop().run_in_executor(None, time.sleep, 3600)
    await asyncio.to_thread(time.sleep, 0)
    return "summary"

program = Program()
print(program.run(main()))
program.exit(3)
"""


@pytest.mark.parametrize("left", ["nothing", "task", "thread"])
def test_what_foreign_code_leaves_does_not_hold_the_end_of_a_program(left: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, left], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.stdout, ended.stderr, ended.returncode) == ("summary\n", "", 3)
