"""Tags, delays and what reactions may touch, on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scheduler.reactor import (
    SECOND,
    Context,
    Program,
    Reactor,
    Runtime,
    Tag,
    TopologyError,
    VirtualClock,
    WallClock,
)
from tests.unit.scheduler.reactor.toys import Again, Do, Fleet, Lost

Seen = list[tuple[Any, ...]]


def run(*reactors: Reactor, start: int = 0, connect: Callable[[Program], None] = lambda _: None) -> Runtime:
    """A started runtime of a program of these."""
    program = Program("p", reactors)
    connect(program)
    runtime = Runtime(program.seal(), VirtualClock(start))
    runtime.start()
    return runtime


class Source(Reactor):
    """Sends what comes from outside."""

    def __init__(self, name: str = "source") -> None:
        super().__init__(name)
        self.event = self.physical("event", int)
        self.out = self.output("out", int)
        self.reaction(
            lambda now: now.set(self.out, now[self.event]), on=[self.event], writes=[self.out], name="send"
        )


class Sink(Reactor):
    """Remembers what comes in, and when."""

    def __init__(self, *names: str) -> None:
        super().__init__("sink")
        self.seen: Seen = []
        self.ports = [self.input(name, int) for name in names]
        self.reaction(self._see, on=self.ports)

    def _see(self, now: Context) -> None:
        self.seen.append((now.tag, *(now.get(port) for port in self.ports)))


# Order


def test_every_event_comes_after_the_start() -> None:
    seen: Seen = []
    reactor = Reactor("a")
    event = reactor.physical("event", int)
    reactor.reaction(lambda now: seen.append((now.tag, now[event])), on=[event], name="r")
    runtime = run(reactor, start=50)
    runtime.inject(event, 1)
    assert seen == []
    runtime.run_until(70)
    runtime.inject(event, 2)
    runtime.advance()
    assert seen == [(Tag(50, 1), 1), (Tag(70), 2)]


def test_a_value_goes_through_a_chain_within_its_tag() -> None:
    """Declared from last to first, so only the levels can put them right."""
    sink, source, middle = Sink("a", "b"), Source(), Reactor("middle")
    i, o = middle.input("i", int), middle.output("o", int)
    middle.reaction(lambda now: now.set(o, now[i] + 1), on=[i], writes=[o], name="add")

    def connect(program: Program) -> None:
        program.connect(o, sink.ports[1])
        program.connect(source.out, i)
        program.connect(source.out, sink.ports[0])

    runtime = run(sink, middle, source, connect=connect)
    runtime.inject(source.event, 5)
    runtime.advance()
    assert sink.seen == [(Tag(0, 1), 5, 6)]


def test_a_reaction_runs_once_however_many_triggers_it_has() -> None:
    one, two, both = Source("one"), Source("two"), Sink("a", "b", "c")

    def connect(program: Program) -> None:
        program.connect(one.out, both.ports[0])
        program.connect(one.out, both.ports[1])
        program.connect(two.out, both.ports[2])

    runtime = run(one, two, both, connect=connect)
    runtime.inject(one.event, 1)
    runtime.inject(two.event, 2)
    runtime.advance()
    assert both.seen == [(Tag(0, 1), 1, 1, None), (Tag(0, 2), None, None, 2)]


@pytest.mark.parametrize(
    ("after", "tags"),
    [
        (None, [Tag(0, 1), Tag(0, 2), Tag(3, 0)]),
        (0, [Tag(0, 2), Tag(0, 3), Tag(3, 1)]),
        (5, [Tag(5, 0), Tag(5, 1), Tag(8, 0)]),
    ],
)
def test_connections_delay(after: int | None, tags: list[Tag]) -> None:
    """Two values that would arrive at one tag arrive one after the other: none is lost."""
    source, sink = Source(), Sink("a")
    runtime = run(source, sink, connect=lambda p: p.connect(source.out, sink.ports[0], after))
    runtime.inject(source.event, 1)
    runtime.inject(source.event, 2)
    runtime.run_until(3)
    runtime.inject(source.event, 3)
    runtime.run_until(100)
    assert sink.seen == [(tag, value) for value, tag in enumerate(tags, 1)]


def test_a_logical_action_scheduled_twice_for_one_tag_happens_twice_in_order() -> None:
    reactor, seen = Reactor("a"), []
    event, action = reactor.physical("event", int), reactor.logical("action", int)

    def schedule(now: Context) -> None:
        now.schedule(action, now[event], after=7)
        now.schedule(action, now[event] + 1, after=7)
        now.schedule(action, now[event] + 2)

    reactor.reaction(schedule, on=[event], writes=[action])
    reactor.reaction(lambda now: seen.append((now.tag, now[action])), on=[action], name="see")
    runtime = run(reactor)
    runtime.inject(event, 10)
    runtime.inject(event, 20)
    runtime.run_until(100)
    now = [(Tag(0, 2), 12), (Tag(0, 3), 22)]
    assert seen == [*now, (Tag(7), 10), (Tag(7, 1), 11), (Tag(7, 2), 20), (Tag(7, 3), 21)]


def test_a_timer_and_an_event_of_one_time_are_of_one_tag() -> None:
    reactor, seen = Reactor("a"), []
    event, timer = reactor.physical("event", int), reactor.logical("timer", int)
    first = reactor.physical("first", int)
    reactor.reaction(lambda now: now.schedule(timer, 1, after=9), on=[first], writes=[timer], name="set")
    reactor.reaction(
        lambda now: seen.append((now.tag, now.get(timer), now.get(event))), on=[timer, event], name="see"
    )
    runtime = run(reactor)
    runtime.inject(first, 0)
    runtime.advance()
    assert runtime.next_time() == 9
    runtime.clock.advance_to(9)  # type: ignore[attr-defined]
    runtime.inject(event, 2)
    runtime.advance()
    assert seen == [(Tag(9), 1, 2)]
    assert runtime.next_time() is None


def test_nothing_runs_before_its_time() -> None:
    source, sink = Source(), Sink("a")
    runtime = run(source, sink, connect=lambda p: p.connect(source.out, sink.ports[0], 10))
    runtime.inject(source.event, 1)
    runtime.run_until(9)
    assert sink.seen == []
    assert not runtime.step()
    runtime.run_until(10)
    assert len(sink.seen) == 1
    with pytest.raises(ValueError, match="cannot go back"):
        runtime.run_until(9)


# Events from outside


def test_tags_of_outside_events_rise_strictly() -> None:
    source = Source()
    runtime = run(source, start=5)
    tags = [runtime.inject(source.event, n) for n in range(3)]
    runtime.clock.advance_to(8)  # type: ignore[attr-defined]
    tags += [runtime.inject(source.event, n) for n in range(2)]
    runtime.advance()
    tags.append(runtime.inject(source.event, 9))
    assert tags == [Tag(5, 1), Tag(5, 2), Tag(5, 3), Tag(8), Tag(8, 1), Tag(8, 2)]


def test_an_event_comes_after_everything_that_was_processed() -> None:
    """Microsteps of a chain do not swallow it, and a clock that stands does not put it back."""
    reactor = Reactor("a")
    event, action = reactor.physical("event", int), reactor.logical("action", int)
    reactor.reaction(
        lambda now: now[action] and now.schedule(action, now[action] - 1),
        on=[action],
        writes=[action],
        name="down",
    )
    reactor.reaction(lambda now: now.schedule(action, 3), on=[event], writes=[action], name="begin")
    runtime = run(reactor)
    runtime.inject(event, 1)
    runtime.advance()
    assert runtime.tag == Tag(0, 5)
    assert runtime.inject(event, 1) == Tag(0, 6)


def test_an_observer_sees_a_complete_tag_and_may_inject() -> None:
    fleet, seen = Fleet(), []
    program = Program("p", [fleet]).seal()
    runtime = Runtime(program, VirtualClock())

    def watch(tag: Tag, commands: tuple[Do, ...]) -> None:
        seen.append((tag, commands, runtime.next_time()))
        if commands[0].engine == "e0":
            runtime.inject(fleet.lost, Lost("e1"))

    runtime.observe(fleet.commands, watch)
    runtime.observe(fleet.commands, lambda tag, _: seen.append((tag, "second")))
    runtime.start()
    runtime.inject(fleet.lost, Lost("e0"))
    runtime.advance()
    assert seen == [
        (Tag(0, 1), (Do("e0", "stop"),), SECOND),
        (Tag(0, 1), "second"),
        (Tag(0, 2), (Do("e1", "stop"),), SECOND),
        (Tag(0, 2), "second"),
    ]


def test_a_tag_does_not_run_within_another() -> None:
    fleet = Fleet()
    runtime = Runtime(Program("p", [fleet]).seal(), VirtualClock())
    runtime.observe(fleet.commands, lambda tag, value: runtime.advance())
    runtime.start()
    runtime.inject(fleet.lost, Lost("e0"))
    with pytest.raises(RuntimeError, match="within another") as raised:
        runtime.advance()
    assert "in an observer of fleet.commands at (0, 1)" in raised.value.__notes__


def test_what_a_runtime_refuses() -> None:
    fleet, stranger = Fleet(), Source()
    program = Program("p", [fleet])
    with pytest.raises(TopologyError, match="not sealed"):
        Runtime(program, VirtualClock())
    runtime = Runtime(program.seal(), VirtualClock())
    with pytest.raises(RuntimeError):
        runtime.advance()
    with pytest.raises(RuntimeError):
        runtime.inject(fleet.lost, Lost("e0"))
    with pytest.raises(TopologyError):
        runtime.observe(stranger.out, print)
    runtime.start()
    with pytest.raises(RuntimeError):
        runtime.start()
    with pytest.raises(RuntimeError):
        runtime.observe(fleet.commands, print)
    with pytest.raises(TopologyError):
        runtime.inject(stranger.event, 1)
    with pytest.raises(TopologyError):
        runtime.inject(fleet.again, Again("e0"))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"fleet\.lost: expected Lost"):
        runtime.inject(fleet.lost, Again("e0"))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        Runtime(program, WallClock()).run_until(1)


# What reactions may do


def within(body: Callable[[Reactor, Context], Any]) -> BaseException:
    """The exception of a reaction, run by `event`, that may see `event` and `i`, and write `o` and `soon`."""
    reactor: Any = Reactor("a")
    reactor.event, reactor.other = reactor.physical("event", int), reactor.physical("other", int)
    reactor.i, reactor.j = reactor.input("i", int), reactor.input("j", int)
    reactor.o, reactor.p = reactor.output("o", int), reactor.output("p", int)
    reactor.soon, reactor.never = reactor.logical("soon", int), reactor.logical("never", int)
    reactor.reaction(
        lambda now: body(reactor, now),
        on=[reactor.event, reactor.i],
        writes=[reactor.o, reactor.soon],
        name="r",
    )
    runtime = run(reactor)
    runtime.inject(reactor.event, 1)
    with pytest.raises(Exception) as raised:  # noqa: PT011
        runtime.advance()
    assert raised.value.__notes__ == ["in reaction a.r at (0, 1)"]
    with pytest.raises(RuntimeError, match="failed"):
        runtime.advance()
    return raised.value


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (lambda a, now: now.get(a.j), TopologyError),
        (lambda a, now: now.get(a.other), TopologyError),
        (lambda a, now: now.get(a.soon), TopologyError),
        (lambda a, now: now.present(a.j), TopologyError),
        (lambda a, now: now[a.j], TopologyError),
        (lambda a, now: now[a.i], KeyError),
        (lambda a, now: now.set(a.p, 1), TopologyError),
        (lambda a, now: now.schedule(a.never, 1), TopologyError),
        (lambda a, now: (now.set(a.o, 1), now.set(a.o, 1)), TopologyError),
        (lambda a, now: now.set(a.o, "1"), TypeError),
        (lambda a, now: now.schedule(a.soon, None), TypeError),
        (lambda a, now: now.schedule(a.soon, 1, after=-1), ValueError),
        (lambda a, now: 1 // 0, ZeroDivisionError),
    ],
)
def test_a_reaction_that_does_what_it_may_not_ends_the_run(
    body: Callable[[Reactor, Context], Any], error: type[BaseException]
) -> None:
    assert type(within(body)) is error


def test_a_context_is_of_no_use_afterwards() -> None:
    source, kept = Source(), []
    source.reaction(kept.append, on=[source.event], name="keep")
    runtime = run(source)
    runtime.inject(source.event, 1)
    runtime.advance()
    with pytest.raises(TopologyError, match="has returned"):
        kept[0].get(source.event)
