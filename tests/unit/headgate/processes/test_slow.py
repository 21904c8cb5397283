"""What takes long is reported while it goes on."""

from __future__ import annotations

import sys
import threading

import pytest

from headgate.processes.child import LocalProcess
from headgate.processes.slow import in_progress, reported
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


@pytest.mark.parametrize(("after_s", "reports"), [(0.0, ["loading"]), (60.0, [])])
def test_a_block_without_an_event_loop_is_reported_once_it_takes_long(
    after_s: float, reports: list[str]
) -> None:
    reported_texts: list[str] = []
    happened = threading.Event()

    def report(text: str) -> None:
        reported_texts.append(text)
        happened.set()

    with in_progress(report, "loading", after_s):
        assert happened.wait(30.0 if reports else 0.0) == bool(reports)
    assert reported_texts == reports
