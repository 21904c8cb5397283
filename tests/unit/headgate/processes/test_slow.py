"""What takes long is reported while it goes on."""

from __future__ import annotations

import sys

from headgate.processes.child import LocalProcess
from headgate.processes.slow import reported
from tests.harness.waiting import turns, until


async def test_a_block_is_reported_once_and_only_if_it_takes_long() -> None:
    messages: list[str] = []
    with reported(messages.append, "the moon", 3600.0):
        await turns()
    with reported(messages.append, "a bus", 0.0):
        await until(lambda: bool(messages), "it is reported")
        await turns()
    assert messages == ["waiting for a bus"]


async def test_a_child_that_takes_long_to_be_ready_is_reported_with_its_log() -> None:
    messages: list[str] = []

    async def ready() -> bool:
        return bool(messages)

    child = await LocalProcess.start(
        "engine-0", [sys.executable, "-c", "import signal; signal.pause()"], None
    )
    try:
        await child.ready(ready, 60.0, messages.append)
    finally:
        await child.stop(0.0)
    assert messages == ["waiting for engine-0 to be ready, for up to 60 s; its log is None"]
