"""Child processes: real ones, since what matters is what the operating system leaves behind."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from headgate.processes.child import LocalProcess
from headgate.processes.errors import ChildDied
from tests.harness.pids import alive
from tests.harness.waiting import LONG_S, result_of, turns, until

Start = Callable[[str], Awaitable[LocalProcess]]

FORKS = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
pathlib.Path({path!r}).write_text(str(child.pid))
time.sleep(60)
"""
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(60)
"""


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    started: list[LocalProcess] = []

    async def start(code: str) -> LocalProcess:
        log = tmp_path / "logs" / "child.log"
        child = await LocalProcess.start("child", [sys.executable, "-c", code], log, {"WORD": "seven"})
        started.append(child)
        return child

    yield start
    for child in started:
        await child.stop(grace_s=0.1)


def written(path: Path) -> Callable[[], bool]:
    return lambda: path.exists() and bool(path.read_text())


async def check_dies_with_parent(code: str, path: Path) -> None:
    """Kill a program once its child has written its process id into the file, and wait until the child is dead."""
    root = Path(__file__).parents[4]
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", code, cwd=root)
    await until(written(path), "it has written its process id")
    parent.kill()
    await parent.wait()
    await until(lambda: not alive(int(path.read_text())), "it is gone")


async def never() -> bool:
    return False


async def test_output_goes_to_the_log_and_the_environment_is_added_to(start: Start) -> None:
    code = "import os, sys; print(os.environ['WORD'], 'PATH' in os.environ); sys.stderr.write('also\\n')"
    child = await start(code)
    assert await child.wait() == child.returncode == 0
    assert set(child.log.read_text().split()) == {"seven", "True", "also"}
    assert await (await start("print('second')")).wait() == 0
    assert child.tail(1) == "second"
    assert set(child.log.read_text().split()) == {"seven", "True", "also", "second"}, "a log is appended to"


async def test_what_it_is_given_takes_the_place_of_what_it_would_inherit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A secret of the parent's environment is not inherited, stdin is closed, and output need not be valid text."""
    monkeypatch.setenv("HEADGATE_SECRET", "a key")
    ours, (read, write) = os.dup(0), os.pipe()
    os.write(write, b"the parent's input")
    os.close(write)
    os.dup2(read, 0)
    code = (
        "import os, sys; sys.stdout.buffer.write(b'\\xff\\xfe' + os.environ['HEADGATE_SECRET'].encode());"
        " print('|', repr(sys.stdin.read()), '|')"
    )
    log = tmp_path / "child.log"
    try:
        child = await LocalProcess.start("child", [sys.executable, "-c", code], log, {"HEADGATE_SECRET": ""})
        assert await child.wait() == 0
    finally:
        os.dup2(ours, 0)
        for descriptor in (ours, read):
            os.close(descriptor)
    assert child.tail() == "\ufffd\ufffd| '' |"


async def test_ready_when_the_check_holds(start: Start) -> None:
    child = await start("import time; print('up', flush=True); time.sleep(60)")

    async def check() -> bool:
        return "up" in child.tail()

    await child.ready(check, timeout_s=LONG_S)


async def test_a_child_that_dies_early_quotes_its_last_lines(start: Start) -> None:
    child = await start("print('no such model'); raise SystemExit(3)")
    with pytest.raises(ChildDied, match=r"(?s)child ended with 3; .*child\.log:\nno such model"):
        await child.ready(never, timeout_s=LONG_S)


async def test_a_dead_child_is_not_ready_although_the_check_holds(start: Start) -> None:
    child = await start("raise SystemExit(3)")
    await child.wait()

    async def check() -> bool:
        return True

    with pytest.raises(ChildDied, match="ended with 3"):
        await child.ready(check, timeout_s=LONG_S)


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_child_that_is_never_ready_is_named(start: Start, hangs: bool) -> None:
    child = await start("import time; time.sleep(60)")

    async def hang() -> bool:
        return await asyncio.Event().wait()

    with pytest.raises(TimeoutError, match=r"child was not ready within 0\.3 s; see .*child\.log"):
        await child.ready(hang if hangs else never, timeout_s=0.3)


async def test_stop_ends_the_child_and_its_children(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "pid"
    child = await start(FORKS.format(path=str(path)))
    await until(written(path), "it has written its process id")
    await child.stop()
    assert child.returncode == -15
    await until(lambda: not alive(int(path.read_text())), "it is gone")
    await child.stop()


async def test_stop_kills_a_child_that_does_not_listen(start: Start) -> None:
    child = await start(STUBBORN)
    await until(lambda: "deaf" in child.tail(), "it does not hear any more")
    await child.stop(grace_s=0.2)
    assert child.returncode == -9


async def test_a_stop_that_is_cancelled_kills_immediately(start: Start) -> None:
    child = await start(STUBBORN)
    await until(lambda: "deaf" in child.tail(), "it does not hear any more")
    stopping = asyncio.create_task(child.stop(grace_s=60), name="stop")
    await turns()  # it has sent SIGTERM, and waits
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert await result_of(child.wait(), "the child is dead") == -9


async def test_kill_reaches_the_whole_group(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "pid"
    child = await start(FORKS.format(path=str(path)))
    await until(written(path), "it has written its process id")
    child.kill()
    assert await child.wait() == -9
    await until(lambda: not alive(int(path.read_text())), "it is gone")


@pytest.mark.parametrize(
    "started", ["LocalProcess.start('child', argv, None)", "start_worker(argv, *3 * [PIPE])"]
)
async def test_a_child_dies_with_its_parent(started: str, tmp_path: Path) -> None:
    """A worker that reads lines dies too, even if it does not read."""
    path = tmp_path / "pid"
    code = f"""
import asyncio, os, pathlib, sys
from asyncio.subprocess import PIPE
from headgate.processes.child import LocalProcess
from headgate.processes.lines import start_worker
async def main():
    argv = [sys.executable, "-c", "import time; time.sleep(1000)"]
    child = await {started}
    pathlib.Path({str(path)!r}).write_text(str(child.pid))
    await asyncio.Event().wait()
asyncio.run(main())
"""
    await check_dies_with_parent(code, path)


async def test_a_child_dies_with_a_parent_that_is_killed_while_it_starts(tmp_path: Path) -> None:
    """The kernel signals only a child that has requested it; this one does so when its parent is dead."""
    path = tmp_path / "pid"
    code = f"""
import os, subprocess, sys
from headgate.processes.child import dependent
late = '''
import os, pathlib, sys, time
pathlib.Path({str(path)!r}).write_text(str(os.getpid()))
while os.getppid() == int(sys.argv[1]):
    time.sleep(0.01)
os.execv(sys.argv[2], sys.argv[2:])
'''
command = dependent([sys.executable, "-c", "import time; time.sleep(600)"])
subprocess.Popen([sys.executable, "-c", late, str(os.getpid()), *command]).wait()
"""
    await check_dies_with_parent(code, path)
