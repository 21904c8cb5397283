"""Runs a program: tag by tag, and within a tag level by level.

Owns logical time: the queue of events, what is present at the current tag, and the tags that outside events get. One thread,
no waiting: `step` runs one tag from its first reaction to its observers. Invariants:

- tags are processed in rising order, each once, and only when the clock has reached their time;
- tags of outside events rise strictly, and lie after every tag that was processed;
- whatever reactions see depends on the outside events, their tags and the deadlines that were missed, on nothing else. These
  are recorded, before anybody learns what was decided.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections.abc import Callable
from typing import Any, TypeVar

from scheduler.reactor import codec
from scheduler.reactor.clock import SECOND, Clock, Tag, VirtualClock
from scheduler.reactor.context import Context
from scheduler.reactor.elements import (
    STARTUP,
    Connection,
    Input,
    LogicalAction,
    Output,
    PhysicalAction,
    Reaction,
    Source,
    TopologyError,
)
from scheduler.reactor.recording import Decision, Event, Failure, Late, Recorder
from scheduler.reactor.topology import Program

T = TypeVar("T")
Observer = Callable[[Tag, Any], None]


class Runtime:
    """One run of a sealed program. `tag` is the last tag that was processed, or is being processed."""

    def __init__(self, program: Program, clock: Clock, recording: Recorder | None = None) -> None:
        if not program.sealed:
            raise TopologyError(f"{program.name} is not sealed")
        self.program = program
        self.clock = clock
        self.tag = Tag(-1)
        self.present: dict[Source[Any] | Output[Any], Any] = {}
        self.wake: Callable[[], None] = _nothing
        self._recording = recording
        self._observers: dict[Output[Any], list[Observer]] = {}
        self._tags: list[Tag] = []
        self._events: dict[Tag, dict[Source[Any], Any]] = {}
        self._injected = self.tag
        self._ready: list[tuple[int, int]] = []
        self._state = "new"
        self._busy = False
        self._order = {reaction: index for index, reaction in enumerate(program.reactions)}
        self._triggered: dict[Source[Any], list[Reaction]] = {}
        for reaction in program.reactions:
            for source in dict.fromkeys(reaction.on):
                self._triggered.setdefault(source, []).append(reaction)
        self._connected: dict[Output[Any], list[Connection]] = {}
        for connection in program.connections:
            self._connected.setdefault(connection.source, []).append(connection)

    # From outside

    def observe(self, port: Output[T], callback: Callable[[Tag, T], None]) -> None:
        """Calls `callback` with every value of `port` once its tag is complete and recorded, in order. Before `start` only."""
        self._must_be("new")
        if self.program.elements.get(port.path) is not port or not isinstance(port, Output):
            raise TopologyError(f"{self.program.name} has no output {port.path}")
        self._observers.setdefault(port, []).append(callback)

    def start(self) -> None:
        """The clock's time becomes that of the first tag, at which STARTUP is present. The first `advance` runs it."""
        self._must_be("new")
        self._state = "running"
        first = Tag(self.clock.now())
        self._put(STARTUP, None, first)
        self._injected = first
        if self._recording is not None:
            self._recording.begin(self.program, first.time)

    def inject(self, action: PhysicalAction[T], value: T) -> Tag:
        """Queues an event from outside, and answers its tag: the clock's time, or just after all that was before it.

        Runs nothing, so anything in the runtime's thread may call it, observers included.
        """
        self._must_be("running")
        if self.program.elements.get(action.path) is not action or not isinstance(action, PhysicalAction):
            raise TopologyError(f"{self.program.name} has no physical action {action.path}")
        _check(action, value)
        now, last = self.clock.now(), max(self.tag, self._injected)
        self._injected = Tag(now) if now > last.time else last.after(0)
        self._put(action, value, self._injected)
        self.wake()
        return self._injected

    def next_time(self) -> int | None:
        """When the next event is due, in ns; None if nothing is pending."""
        return self._tags[0].time if self._tags else None

    def advance(self) -> None:
        """Runs every tag that is due. An exception of a reaction comes out, with its name, and ends the run."""
        while self.step():
            pass

    def step(self) -> bool:
        """Runs the next tag if it is due; answers whether it was."""
        self._must_be("running")
        if self._busy:
            raise RuntimeError(f"{self.program.name} is at {self.tag}: a tag cannot run within another")
        if not self._tags or self._tags[0].time > self.clock.now():
            return False
        self._busy = True
        try:
            self._run(heapq.heappop(self._tags))
        except BaseException:
            self._state = "failed"
            raise
        finally:
            self._busy = False
        return True

    def run_until(self, time: int) -> None:
        """Moves a virtual clock from event to event, and then to `time`."""
        if not isinstance(self.clock, VirtualClock):
            raise TypeError("only a virtual clock can be moved")
        self.advance()
        while (due := self.next_time()) is not None and due <= time:
            self.clock.advance_to(due)
            self.advance()
        self.clock.advance_to(time)

    # From reactions

    def emit(self, reaction: Reaction, port: Output[T], value: T, why: str) -> None:
        """See `Context.set`."""
        _check(port, value)
        if port in self.present:
            raise TopologyError(f"{reaction.path} sets {port.path}, which is set already at {self.tag}")
        self.present[port] = value
        self._record_decision(reaction, port, value, why)
        for connection in self._connected.get(port, ()):
            if connection.after is None:
                self._arrive(connection.target, value)
            else:
                self._put_free(connection.target, value, connection.after)

    def defer(self, action: LogicalAction[T], value: T, after: int) -> None:
        """See `Context.schedule`."""
        _check(action, value)
        if after < 0:
            raise ValueError(f"{action.path} scheduled {-after} ns in the past")
        self._put_free(action, value, after)

    # One tag

    def _run(self, tag: Tag) -> None:
        self.tag = tag
        self.present = {}
        try:
            for source, value in self._events.pop(tag).items():
                if isinstance(source, PhysicalAction) and self._recording is not None:
                    self._recording.write(Event(tag, source.path, codec.to_json(value)))
                self._arrive(source, value)
            while self._ready:
                _, index = heapq.heappop(self._ready)
                self._react(self.program.reactions[index])
        finally:
            if self._recording is not None:
                self._recording.flush(tag)
        for port in [p for p in self.present if p in self._observers]:
            for observer in self._observers[port]:
                try:
                    observer(tag, self.present[port])
                except BaseException as error:
                    error.add_note(f"in an observer of {port.path} at {tag}")
                    raise

    def _arrive(self, source: Source[Any], value: Any) -> None:
        self.present[source] = value
        for reaction in self._triggered.get(source, ()):
            entry = (reaction.level, self._order[reaction])
            if entry not in self._ready:
                heapq.heappush(self._ready, entry)

    def _react(self, reaction: Reaction) -> None:
        context = Context(self, reaction, self.tag)
        body = reaction.body
        if reaction.late is not None and self._is_late(reaction):
            body = reaction.late
            if self._recording is not None:
                self._recording.write(Late(self.tag, reaction.path))
        try:
            body(context)
        except BaseException as error:
            error.add_note(f"in reaction {reaction.path} at {self.tag}")
            if self._recording is not None:
                self._recording.write(Failure(self.tag, reaction.path, type(error).__name__))
            raise
        finally:
            context.close()

    def _is_late(self, reaction: Reaction) -> bool:
        """Reads the clock; a replay overrides it."""
        assert reaction.deadline is not None
        return self.clock.now() > self.tag.time + reaction.deadline

    def _record_decision(self, reaction: Reaction, port: Output[Any], value: Any, why: str) -> None:
        if self._recording is not None:
            triggers = tuple(source.path for source in reaction.on if source in self.present)
            self._recording.write(
                Decision(self.tag, port.path, codec.to_json(value), reaction.path, triggers, why)
            )

    # The queue

    def _put(self, source: Source[Any], value: Any, tag: Tag) -> None:
        if tag not in self._events:
            self._events[tag] = {}
            heapq.heappush(self._tags, tag)
        self._events[tag][source] = value

    def _put_free(self, source: Source[Any], value: Any, after: int) -> None:
        tag = self.tag.after(after)
        while source in self._events.get(tag, ()):
            tag = tag.after(0)
        self._put(source, value, tag)

    def _must_be(self, state: str) -> None:
        if self._state != state:
            raise RuntimeError(f"{self.program.name} is {self._state}, not {state}")


async def drive(runtime: Runtime) -> None:
    """Runs what is due whenever something is injected or time passes, until it is cancelled. For the wall clock.

    Between two tags the event loop gets its turn, so a long chain of microsteps does not hold others up.
    """
    woken = asyncio.Event()
    runtime.wake = woken.set
    while True:
        woken.clear()
        if runtime.step():
            await asyncio.sleep(0)
            continue
        due = runtime.next_time()
        timeout = None if due is None else (due - runtime.clock.now()) / SECOND
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await woken.wait()


def _check(element: Input[Any] | Source[Any] | Output[Any], value: Any) -> None:
    try:
        codec.check(value, element.type)
    except TypeError as error:
        raise TypeError(f"{element.path}: {error}") from None


def _nothing() -> None:
    pass
