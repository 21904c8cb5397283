"""The parts that reactors are made of: ports, actions, reactions, and the connections between ports.

A declaration has no state. What is present at a tag belongs to the runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii
from typing import Any, Generic, TypeVar

from scheduler.reactor.codec import Form

T = TypeVar("T")


class TopologyError(Exception):
    """A program that cannot be built, or a reaction that does what it did not declare."""


# Ports and actions, as reactions use them


class Element(Generic[T]):
    """A port or an action; `path` is its name in the program, `quoted` that in JSON. Made by the methods of `Reactor`."""

    kind = "element"

    def __init__(self, reactor: str, name: str, declared: type[T]) -> None:
        self.form = Form(declared)
        self.reactor = reactor
        self.name = name
        self.type = declared
        self.path = f"{reactor}.{name}"
        self.quoted = encode_basestring_ascii(self.path)

    def __repr__(self) -> str:
        return f"<{self.kind} {self.path}>"


class Source(Element[T]):
    """A trigger of reactions."""


class Effect(Element[T]):
    """A target that a reaction writes."""


class Input(Source[T]):
    """A port that another reactor's output may be connected to."""

    kind = "input"


class Output(Effect[T]):
    """A port that reactions write, one value per tag."""

    kind = "output"


class PhysicalAction(Source[T]):
    """The only door for events from outside: see `Runtime.inject`."""

    kind = "physical"


class LogicalAction(Source[T], Effect[T]):
    """An event that the reactor schedules for itself."""

    kind = "logical"


class Reaction:
    """A reaction as it was declared; `level` is set by `Program.seal`, and `body` is called with the reaction's `Context`."""

    def __init__(
        self,
        reactor: str,
        name: str,
        body: Callable[[Any], None],
        on: Sequence[Source[Any]],
        writes: Sequence[Effect[Any]],
    ) -> None:
        self.reactor, self.name, self.body = reactor, name, body
        self.path = f"{reactor}.{name}"
        self.quoted = encode_basestring_ascii(self.path)
        self.on, self.writes = tuple(on), tuple(writes)
        self.level = -1
        self.sources = frozenset(on)
        self.effects = frozenset(writes)

    def __repr__(self) -> str:
        return f"<reaction {self.path}>"


@dataclass(frozen=True, slots=True)
class Connection:
    """`after` is None for the same tag, 0 for the next microstep, else the logical delay in ns."""

    source: Output[Any]
    target: Input[Any]
    after: int | None
