"""Valid and invalid topologies, and the levels derived from them."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.reactor import Context, Output, Program, Reactor, TopologyError
from tests.unit.scheduler.reactor.toys import Lost, toy


def nothing(now: Context) -> None:
    """A reaction."""


def relay(name: str, writes: bool = True) -> Any:
    """A reactor with one input, one output and a reaction between, and a timer."""
    reactor: Any = Reactor(name)
    reactor.timer = reactor.logical("timer", int)
    reactor.i, reactor.o = reactor.input("i", int), reactor.output("o", int)
    reactor.reaction(nothing, on=[reactor.i], writes=[reactor.o] if writes else [])
    return reactor


def levels(program: Program) -> dict[str, int]:
    return {reaction.path: reaction.level for reaction in program.reactions}


def test_levels_follow_declarations_and_connections() -> None:
    a, b, c = relay("a"), relay("b"), relay("c")
    a.reaction(nothing, on=[a.timer], name="second")
    b.reaction(nothing, on=[b.timer, b.i], name="second")
    program = Program("p", [c, b, a])
    program.connect(a.o, b.i)
    program.connect(b.o, c.i)
    assert levels(program.seal()) == {
        "c.nothing": 2,
        "b.nothing": 1,
        "b.second": 2,
        "a.nothing": 0,
        "a.second": 1,
    }


def test_a_cycle_is_refused_by_name() -> None:
    a, b, c, outside = relay("a"), relay("b"), relay("c"), relay("outside")
    program = Program("p", [outside, a, b, c])
    for source, target in ((a, b), (b, c), (c, a)):
        program.connect(source.o, target.i)
    program.connect(b.o, outside.i)
    with pytest.raises(TopologyError) as refused:
        program.seal()
    message = str(refused.value)
    for step in ("[a.o -> b.i] b.nothing", "[b.o -> c.i] c.nothing", "[c.o -> a.i] a.nothing"):
        assert step in message
    assert "outside" not in message


def test_a_cycle_through_the_order_of_declaration_is_refused() -> None:
    """The second reaction of `a` writes what the first one of `a` sees."""
    a, b = Reactor("a"), relay("b")
    i, o = a.input("i", int), a.output("o", int)
    a.reaction(nothing, on=[i], name="first")
    a.reaction(nothing, on=[a.physical("event", int)], writes=[o], name="second")
    program = Program("p", [a, b])
    program.connect(o, b.i)
    program.connect(b.o, i)
    with pytest.raises(TopologyError, match=r"\[declared before\] a\.second"):
        program.seal()


@pytest.mark.parametrize("after", [0, 5])
def test_a_delay_breaks_a_cycle(after: int) -> None:
    a, b = relay("a"), relay("b")
    program = Program("p", [a, b])
    program.connect(a.o, b.i)
    program.connect(b.o, a.i, after=after)
    assert levels(program.seal()) == {"a.nothing": 0, "b.nothing": 1}


def test_an_input_has_one_writer() -> None:
    a, b, c = relay("a"), relay("b"), relay("c")
    program = Program("p", [a, b, c])
    program.connect(a.o, c.i)
    with pytest.raises(TopologyError, match=r"a\.o writes it already"):
        program.connect(b.o, c.i, after=0)


def test_connections_that_make_no_sense_are_refused() -> None:
    a, b, stranger = relay("a"), relay("b"), relay("stranger")
    text = b.input("text", str)
    program = Program("p", [a, b])
    for source, target, after in (
        (a.o, text, None),
        (a.i, b.i, None),
        (a.o, b.o, None),
        (a.o, stranger.i, None),
        (stranger.o, a.i, None),
        (a.o, b.i, -1),
    ):
        with pytest.raises(TopologyError):
            program.connect(source, target, after)
    assert program.connections == []


def test_reactions_declare_what_is_theirs_and_what_they_can_use() -> None:
    a, b = relay("a"), relay("b")
    event = a.physical("event", Lost)
    for arguments in (
        {"on": []},
        {"on": [b.i]},
        {"on": [a.o]},
        {"on": [a.i], "writes": [a.i]},
        {"on": [a.i], "writes": [event]},
        {"on": [a.i], "writes": [b.o]},
        {"on": [a.i], "name": "nothing"},
        {"on": [a.i], "name": "two words"},
    ):
        with pytest.raises(TopologyError):
            a.reaction(nothing, **{"name": "other", **arguments})
    assert len(a.reactions) == 1


def test_names_are_taken_once() -> None:
    a = relay("a")
    with pytest.raises(TopologyError):
        a.output("i", int)
    with pytest.raises(TopologyError):
        Program("p", [relay("a"), relay("a")])


def test_nothing_changes_once_it_is_sealed() -> None:
    a, b = relay("a"), relay("b")
    program = Program("p", [a, b]).seal()
    for change in (
        lambda: program.connect(a.o, b.i),
        lambda: a.input("late", int),
        lambda: a.reaction(nothing, on=[a.i], name="late"),
        lambda: Program("q", [a]),
    ):
        with pytest.raises(TopologyError):
            change()


def test_the_digest_is_that_of_the_topology() -> None:
    def digest(type_: Any = int, after: int | None = None, writes: bool = True) -> str:
        a, b = relay("a", writes), relay("b")
        a.physical("event", type_)
        program = Program("p", [a, b])
        program.connect(a.o, b.i, after)
        return program.seal().digest()

    assert digest() == digest()
    assert len({digest(), digest(type_=Lost), digest(after=0), digest(after=1), digest(writes=False)}) == 5
    assert toy({"restarts": 1}).digest() == toy({"restarts": 2}).digest()


def test_ports_know_their_types() -> None:
    port: Output[tuple[Lost, ...]] = Reactor("a").output("o", tuple[Lost, ...])
    assert port.path == "a.o"
    with pytest.raises(TypeError):
        Reactor("a").output("o", list)
