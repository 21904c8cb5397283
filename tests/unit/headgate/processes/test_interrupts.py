"""Ctrl-C: the first ends the work in order, the second ends the process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from signal import SIGINT, SIGTERM, Signals

import pytest

PROGRAM = """
import asyncio, sys, time
from headgate.processes.interrupts import Interrupted, interruptible

async def work():
    print("begun", flush=True)
    if "blocked" in sys.argv:
        time.sleep(3600)
    try:
        await asyncio.Event().wait()
    finally:
        if "slow" in sys.argv:
            await asyncio.Event().wait()
        print("ended", flush=True)

async def main():
    try:
        await interruptible(work(), lambda text: print(text, flush=True), "ending")
    except Interrupted:
        print("summary", flush=True)

asyncio.run(main())
"""


@contextmanager
def program(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [SIGINT, SIGTERM])
def test_the_first_signal_ends_the_work_in_order(number: Signals) -> None:
    with program() as process:
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
    assert output.splitlines() == ["ending; press ctrl-c again to end immediately", "ended", "summary"]
    assert process.returncode == 0


def test_a_second_ctrl_c_ends_the_process_and_a_second_sigterm_does_not() -> None:
    with program("slow") as process:
        assert process.stdout is not None
        process.send_signal(SIGINT)
        assert process.stdout.readline().startswith("ending")
        process.send_signal(SIGTERM)
        process.send_signal(SIGINT)
        assert process.wait(60) == 130
        assert process.stdout.read() == ""


@pytest.mark.parametrize("first", [SIGINT, SIGTERM])
def test_ctrl_c_ends_a_process_whose_event_loop_is_blocked(first: Signals) -> None:
    with program("blocked") as process:
        assert process.stdout is not None
        process.send_signal(first)
        assert process.stdout.readline().startswith(
            "interrupted, but code in this process blocks the event loop"
        )
        process.send_signal(SIGINT)
        assert process.wait(60) == 130
