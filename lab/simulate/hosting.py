"""Hosts a control program in virtual time, as `gateway/control/host.py` does on the wall clock.

Owns the runtime, its clock and the recording. The clock advances to the world's before each event, so timers that are due come
first. The program's commands are queued, since nothing may be injected while it runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from scheduler.program import ControlProgram
from scheduler.reactor import SECOND, Output, PhysicalAction, Recording, Runtime, VirtualClock

T = TypeVar("T")


class Hosting:
    """A program in virtual time."""

    def __init__(self, settings: dict[str, Any], recording: Path | None = None) -> None:
        """Host a program. `settings`: those of `ControlProgram`."""
        self.program = ControlProgram(settings)
        self.wanted: deque[Any] = deque()
        """The commands of the program, in order."""
        self.clock: Callable[[], float] = lambda: 0.0
        """The world's time, in seconds."""
        self._recording = Recording.open(recording, settings) if recording else None
        self._clock = VirtualClock()
        self._runtime = Runtime(self.program, self._clock, self._recording)

    def want(self, port: Output[tuple[T, ...]]) -> None:
        """Collect the commands of this output. Before `start` only."""
        self._runtime.observe(port, lambda _tag, values: self.wanted.extend(values))

    def observe(self, port: Output[T], callback: Callable[[T], None]) -> None:
        """Call `callback`, which injects nothing, with every value of an output. Before `start` only."""
        self._runtime.observe(port, lambda _tag, values: callback(values))

    def start(self) -> None:
        self._runtime.start()

    def inject(self, action: PhysicalAction[T], value: T) -> None:
        """Inject an event; when this returns, `wanted` has the commands that follow."""
        self._runtime.run_until(round(self.clock() * SECOND))
        self._runtime.inject(action, value)
        self._runtime.advance()

    def close(self) -> None:
        """End the recording."""
        if self._recording is not None:
            self._recording.close()
