"""The structure of a program of reactors, and the order in which its reactions run.

The model is that of Lingua Franca (arXiv 2312.04704): a *reactor* has ports, actions, state of its own and *reactions*; a
reaction runs when one of its triggers is present and touches nothing but what it declared. Connections carry values from
outputs to inputs, at the same tag or a logical delay later. Everything is declared before the start, and `Program.seal` gives
every reaction a *level*, once.

Invariants of a sealed program:
- an input has at most one writer, so a value at a tag has one source;
- reactions of one reactor have rising levels in the order of their declaration, and a reaction that writes an output has a
  lower level than every reaction that sees it at the same tag: running level by level, nothing is read before it is written;
- nothing in it changes any more.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, TypeVar

from scheduler.reactor import codec
from scheduler.reactor.context import Body
from scheduler.reactor.elements import (
    Connection,
    Effect,
    Element,
    Input,
    LogicalAction,
    Output,
    PhysicalAction,
    Reaction,
    Source,
    TopologyError,
)
from scheduler.reactor.levels import assign_levels

T = TypeVar("T")
E = TypeVar("E", bound=Element[Any])


class Reactor:
    """State, and reactions to what happens. A subclass declares its ports, actions and reactions in its __init__."""

    def __init__(self, name: str) -> None:
        self.name = _checked(name)
        self.elements: dict[str, Element[Any]] = {}
        self.reactions: list[Reaction] = []
        self.sealed = False

    def input(self, name: str, type: type[T]) -> Input[T]:
        """Return a port that receives."""
        return self._add(Input(self.name, name, type))

    def output(self, name: str, type: type[T]) -> Output[T]:
        """Return an output port."""
        return self._add(Output(self.name, name, type))

    def physical(self, name: str, type: type[T]) -> PhysicalAction[T]:
        """Return an action for events from outside."""
        return self._add(PhysicalAction(self.name, name, type))

    def logical(self, name: str, type: type[T]) -> LogicalAction[T]:
        """Return an action for events that the reactor schedules itself."""
        return self._add(LogicalAction(self.name, name, type))

    def reaction(
        self,
        body: Body,
        on: Sequence[Source[Any]],
        writes: Sequence[Effect[Any]] = (),
        name: str | None = None,
    ) -> Reaction:
        """`body` runs when anything of `on` is present; it may see `on`, and write `writes`.

        The reaction is named like `body`, without leading underscores.
        """
        name = _checked(name or body.__name__.lstrip("_"))
        reaction = Reaction(self.name, name, body, on, writes)
        if self.sealed or any(other.name == name for other in self.reactions):
            raise TopologyError(f"{reaction.path}: the program is sealed, or has a reaction of that name")
        if not on:
            raise TopologyError(f"{reaction.path} has no trigger")
        for element in (*on, *writes):
            if self.elements.get(element.name) is not element:
                raise TopologyError(f"{reaction.path} declares {element.path}, which is not of {self.name}")
        _refuse_kinds(reaction)
        self.reactions.append(reaction)
        return reaction

    def _add(self, element: E) -> E:
        if self.sealed or _checked(element.name) in self.elements:
            raise TopologyError(f"{element.path}: the program is sealed, or has that name")
        self.elements[element.name] = element
        return element


def _checked(name: str) -> str:
    if not name.isidentifier():
        raise TopologyError(f"{name!r} is not a name: letters, digits and underscores")
    return name


def _refuse_kinds(reaction: Reaction) -> None:
    for source in reaction.on:
        if not isinstance(source, Source):
            raise TopologyError(f"{reaction.path} cannot see {source.path}: it is an {source.kind}")
    for effect in reaction.writes:
        if not isinstance(effect, Effect):
            raise TopologyError(f"{reaction.path} cannot write {effect.path}: it is an {effect.kind}")


class Program:
    """Reactors and the connections between them. `reactions`, in order of declaration, is there once it is sealed."""

    state_packages: tuple[str, ...] = ()
    """Packages without effects, whose classes the state of reactors may consist of, in addition to the reactors' modules."""

    def __init__(self, name: str, reactors: Sequence[Reactor]) -> None:
        self.name = _checked(name)
        self.reactors = tuple(reactors)
        self.connections: list[Connection] = []
        self.reactions: tuple[Reaction, ...] = ()
        self.elements: dict[str, Element[Any]] = {}
        self.sealed = False
        names = [reactor.name for reactor in self.reactors]
        for reactor in self.reactors:
            if names.count(reactor.name) > 1 or reactor.sealed:
                raise TopologyError(f"{reactor.name}: two reactors of that name, or one of another program")

    def connect(self, source: Output[T], target: Input[T], after: int | None = None) -> None:
        """Make what is set on `source` present at `target` (see `Connection`)."""
        link = f"{source.path} -> {target.path}"
        mine = {element for reactor in self.reactors for element in reactor.elements.values()}
        if self.sealed or not {source, target} <= mine:
            raise TopologyError(f"{link}: the program is sealed, or lacks one of the two")
        if not isinstance(source, Output) or not isinstance(target, Input):
            raise TopologyError(f"{link}: connections go from outputs to inputs")
        if source.type != target.type:
            raise TopologyError(f"{link}: one carries {source.type}, the other {target.type}")
        if after is not None and after < 0:
            raise TopologyError(f"{link}: a delay of {after}")
        for other in self.connections:
            if other.target is target:
                raise TopologyError(f"{link}: {other.source.path} writes it already")
        self.connections.append(Connection(source, target, after))

    def seal(self) -> Program:
        """End the declarations and compute the levels. Raise TopologyError if there is a cycle without a delay."""
        self.reactions = tuple(reaction for reactor in self.reactors for reaction in reactor.reactions)
        assign_levels(self.reactions, self.connections)
        self.elements = {e.path: e for reactor in self.reactors for e in reactor.elements.values()}
        for reactor in self.reactors:
            reactor.sealed = True
        self.sealed = True
        return self

    def description(self) -> dict[str, Any]:
        """Return the topology as JSON: what two programs must share for one's recording to be the other's."""
        return {
            "program": self.name,
            "elements": [[e.kind, e.path, codec.describe(e.type)] for e in self.elements.values()],
            "reactions": [
                {
                    "reaction": reaction.path,
                    "on": [e.path for e in reaction.on],
                    "writes": [e.path for e in reaction.writes],
                    "level": reaction.level,
                }
                for reaction in self.reactions
            ],
            "connections": [[c.source.path, c.target.path, c.after] for c in self.connections],
        }

    def digest(self) -> str:
        """Return the SHA-256 of the description."""
        return hashlib.sha256(json.dumps(self.description(), sort_keys=True).encode()).hexdigest()
