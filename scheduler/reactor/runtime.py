"""Runs a program: tag by tag, and within a tag level by level.

Owns logical time: the queue of events, what is present at the current tag, and the tags that outside events get. `step` runs one
tag from its first reaction to its observers, in one thread. Invariants:

- tags are processed in rising order, each once, and only when the clock has reached their time;
- tags of outside events rise strictly, and lie after every tag that was processed;
- reactions of one level run in the order of declaration, and only higher levels see what they write;
- the input of reactions depends only on the outside events and their tags. These are recorded before anything learns
  what was decided.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections.abc import Callable
from operator import attrgetter
from typing import Any, TypeVar

from scheduler.reactor.clock import SECOND, Clock, Tag, VirtualClock
from scheduler.reactor.context import Context, refuse
from scheduler.reactor.elements import Output, PhysicalAction, Source, TopologyError
from scheduler.reactor.recording import Failure, Recorder, add_decisions, event_line, line
from scheduler.reactor.snapshot import state_text
from scheduler.reactor.topology import Program

T = TypeVar("T")
Observer = Callable[[Tag, Any], None]
_order = attrgetter("order")


class Runtime:
    """One run of a sealed program. `tag` is the last tag that was processed, or is being processed."""

    def __init__(self, program: Program, clock: Clock, recording: Recorder | None = None) -> None:
        if not program.sealed:
            raise TopologyError(f"{program.name} is not sealed")
        self.program = program
        self.clock = clock
        self.tag = Tag(-1)
        self._next, self._at = Tag(-1, 1), ""
        self.present: dict[Source[Any] | Output[Any], Any] = {}
        self.wake: Callable[[], None] = _nothing
        self._recording = recording
        self.recorded = recording is not None
        """True while the run is recorded."""
        self._lines: list[str] = []
        self._observers: dict[Output[Any], list[Observer]] = {}
        self._observed: list[tuple[Output[Any], Any]] = []
        self._tags: list[Tag] = []
        self._events: dict[Tag, dict[Source[Any], Any]] = {}
        self._injected = self.tag
        self._state = "new"
        self._busy = False
        self._levels: list[list[Context]] = [
            [] for _ in range(1 + max((r.level for r in program.reactions), default=0))
        ]
        self._triggered: dict[Source[Any], list[tuple[Context, list[Context]]]] = {}
        for index, reaction in enumerate(program.reactions):
            context = Context(self, reaction, index)
            for source in dict.fromkeys(reaction.on):
                self._triggered.setdefault(source, []).append((context, self._levels[reaction.level]))
        self._connected: dict[Output[Any], list[tuple[Source[Any], int | None]]] = {
            element: [] for element in program.elements.values() if isinstance(element, Output)
        }
        for connection in program.connections:
            self._connected[connection.source].append((connection.target, connection.after))

    # Input from outside

    def observe(self, port: Output[T], callback: Callable[[Tag, T], None]) -> None:
        """Call `callback` with every value of `port` once its tag is complete and recorded, in order. Before `start` only."""
        self._must_be("new")
        if self.program.elements.get(port.path) is not port or not isinstance(port, Output):
            raise TopologyError(f"{self.program.name} has no output {port.path}")
        self._observers.setdefault(port, []).append(callback)

    def start(self) -> None:
        """Begin the run at the clock's time, and its recording; every tag comes after."""
        self._must_be("new")
        self._state = "running"
        first = Tag(self.clock.now())
        self._injected = first
        if self._recording is not None:
            self._recording.begin(self.program, first.time)

    def inject(self, action: PhysicalAction[T], value: T) -> Tag:
        """Queue an event from outside, and return its tag: the clock's time, or just after all that was before it.

        Runs nothing, so anything in the runtime's thread may call it, observers included.
        """
        tag = self._queue(action, value)
        self.wake()
        return tag

    def inject_now(self, action: PhysicalAction[T], value: T) -> None:
        """Inject an event and run every tag that is due, as `advance` does.

        `wake` is called only if something is left that is due before all that was pending, which its driver waits for.
        """
        due = self.next_time()
        self._queue(action, value)
        self.advance()
        left = self.next_time()
        if left is not None and (due is None or left < due):
            self.wake()

    def _queue(self, action: PhysicalAction[T], value: T) -> Tag:
        self._must_be("running")
        if self.program.elements.get(action.path) is not action or not isinstance(action, PhysicalAction):
            raise TopologyError(f"{self.program.name} has no physical action {action.path}")
        if not action.form.fits(value):
            refuse(action, value)
        now, last = self.clock.now(), max(self.tag, self._injected)
        self._injected = Tag(now) if now > last.time else last.after(0)
        self._put(action, value, self._injected)
        return self._injected

    def next_time(self) -> int | None:
        """Return the time of the next event in ns; None if nothing is pending."""
        return self._tags[0].time if self._tags else None

    def advance(self) -> None:
        """Run every tag that is due. An exception of a reaction comes out, with its name, and end the run."""
        while self.step():
            pass

    def step(self) -> bool:
        """Run the next tag if it is due; return whether it was."""
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
        """Move a virtual clock from event to event, and then to `time`."""
        if not isinstance(self.clock, VirtualClock):
            raise TypeError("only a virtual clock can be moved")
        self.advance()
        while (due := self.next_time()) is not None and due <= time:
            self.clock.advance_to(due)
            self.advance()
        self.clock.advance_to(time)

    # One tag

    def _run(self, tag: Tag) -> None:
        self.tag, self._next, self._at = tag, tag.after(0), f"[{tag.time},{tag.microstep}]"
        self.present.clear()
        try:
            for source, value in self._events.pop(tag).items():
                if isinstance(source, PhysicalAction) and self._recording is not None:
                    self._lines.append(event_line(self._at, source, source.form.text(value)))
                self._arrive(source, value)
            for level in self._levels:
                if level:
                    self._run_level(level)
        finally:
            lines, self._lines = self._lines, []
            if self._recording is not None and not self._recording.write(tag, lines):
                self._recording, self.recorded = None, False
        if self._recording is not None and self._recording.due(tag.time):
            self._recording.go_on(self.program, self.state())
        if self._observed:
            self._notify(tag)

    def state(self) -> str:
        """Return the state of the program after its last tag (`snapshot.py`). What was injected since then is an input of its
        own."""
        scheduled = [
            (tag, source, value)
            for tag in sorted(self._events)
            for source, value in self._events[tag].items()
            if not isinstance(source, PhysicalAction)
        ]
        return state_text(self.program, scheduled)

    def _arrive(self, source: Source[Any], value: Any) -> None:
        self.present[source] = value
        for context, level in self._triggered.get(source, ()):
            if not context.queued:
                context.queued = True
                level.append(context)

    def _run_level(self, level: list[Context]) -> None:
        """Run the reactions of a level. Only higher levels see what they write, so a subclass may run all before it
        applies any."""
        if len(level) > 1:
            level.sort(key=_order)
        for context in level:
            context.run()
            self._apply(context)
        level.clear()

    def _apply(self, context: Context) -> None:
        """Apply what a reaction wrote, and raise what it raised."""
        if context.sent:
            self._send(context)
        if context.scheduled:
            for action, value, after in context.scheduled:
                self._put_free(action, value, after)
            context.scheduled.clear()
        if context.error is not None:
            self._fail(context, context.error)

    def _send(self, context: Context) -> None:
        if self.recorded:
            add_decisions(self._lines, self._at, context.reaction, context.triggers(), context.sent)
        observers = self._observers
        for port, value, _, _ in context.sent:
            for target, after in self._connected[port]:
                if after is None:
                    self._arrive(target, value)
                else:
                    self._put_free(target, value, after)
            if port in observers:
                self._observed.append((port, value))
        context.sent.clear()

    def _fail(self, context: Context, error: BaseException) -> None:
        error.add_note(f"in reaction {context.reaction.path} at {self.tag}")
        self._lines.append(line(Failure(self.tag, context.reaction.path, type(error).__name__)))
        raise error

    def _notify(self, tag: Tag) -> None:
        observed, self._observed = self._observed, []
        for port, value in observed:
            for observer in self._observers[port]:
                try:
                    observer(tag, value)
                except BaseException as error:
                    error.add_note(f"in an observer of {port.path} at {tag}")
                    raise

    # The queue

    def _put(self, source: Source[Any], value: Any, tag: Tag) -> None:
        events = self._events.get(tag)
        if events is None:
            self._events[tag] = {source: value}
            heapq.heappush(self._tags, tag)
        else:
            events[source] = value

    def _put_free(self, source: Source[Any], value: Any, after: int) -> None:
        tag = self.tag.after(after) if after else self._next
        while source in self._events.get(tag, ()):
            tag = tag.after(0)
        self._put(source, value, tag)

    def _must_be(self, state: str) -> None:
        if self._state != state:
            raise RuntimeError(f"{self.program.name} is {self._state}, not {state}")


async def drive(runtime: Runtime) -> None:
    """Run what is due whenever something is injected or time passes, until it is cancelled. For the wall clock.

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


def _nothing() -> None:
    pass
