"""The interface between a running reaction and its program."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from scheduler.reactor.clock import Tag
from scheduler.reactor.elements import Effect, Element, LogicalAction, Output, Reaction, Source, TopologyError

T = TypeVar("T")
_NOTHING: frozenset[Any] = frozenset()


class Instant(Protocol):
    """The part of a runtime that reactions read."""

    tag: Tag
    present: dict[Source[Any] | Output[Any], Any]
    recorded: bool


class Context:
    """One reaction of a runtime. Raise TopologyError for what the reaction did not declare, and while it does not run.

    Keeps what the reaction writes until the runtime applies it, so that reactions of one level can run in any order.
    """

    __slots__ = (
        "_effects",
        "_present",
        "_runtime",
        "_sources",
        "error",
        "order",
        "queued",
        "reaction",
        "scheduled",
        "sent",
    )

    def __init__(self, runtime: Instant, reaction: Reaction, order: int) -> None:
        self.reaction = reaction
        self.order = order
        """The reaction's place in the program."""
        self.queued = False
        """True if the reaction is queued at this tag."""
        self.error: BaseException | None = None
        self.sent: list[tuple[Output[Any], Any, str, str]] = []
        """Port, value, its text for the recording, why."""
        self.scheduled: list[tuple[LogicalAction[Any], Any, int]] = []
        self._runtime = runtime
        self._present = runtime.present
        self._sources: frozenset[Source[Any]] = _NOTHING
        self._effects: frozenset[Effect[Any]] = _NOTHING

    @property
    def tag(self) -> Tag:
        """The present tag."""
        return self._runtime.tag

    def get(self, source: Source[T]) -> T | None:
        """Return the value at this tag, or None if it is absent."""
        if source not in self._sources:
            raise self._refusal(source, "see")
        value: T | None = self._present.get(source)
        return value

    def __getitem__(self, source: Source[T]) -> T:
        """Return the value at this tag, of a source that is known to be present. Raise KeyError if it is absent."""
        if source not in self._sources:
            raise self._refusal(source, "see")
        found: T = self._present[source]
        return found

    def present(self, source: Source[Any]) -> bool:
        """Return true if the source has a value at this tag."""
        if source not in self._sources:
            raise self._refusal(source, "see")
        return source in self._present

    def set(self, port: Output[T], value: T, why: str = "") -> None:
        """Send a value, at this tag. Raise TopologyError if the port has one already, TypeError if it is of another type."""
        if port not in self._effects:
            raise self._refusal(port, "write")
        if not port.form.fits(value):
            refuse(port, value)
        if port in self._present:
            raise TopologyError(f"{self.reaction.path} sets {port.path}, which is set already at {self.tag}")
        self._present[port] = value
        self.sent.append((port, value, port.form.text(value) if self._runtime.recorded else "", why))

    def schedule(self, action: LogicalAction[T], value: T, after: int = 0) -> None:
        """Schedule an action `after` ns later, or at the next microstep, behind the actions that the tag already has."""
        if action not in self._effects:
            raise self._refusal(action, "write")
        if not action.form.fits(value):
            refuse(action, value)
        if after < 0:
            raise ValueError(f"{action.path} scheduled {-after} ns in the past")
        self.scheduled.append((action, value, after))

    # For the runtime

    def run(self) -> None:
        """Run the reaction, and keep what it raises."""
        self.queued = False
        self._sources, self._effects = self.reaction.sources, self.reaction.effects
        try:
            self.reaction.body(self)
        except BaseException as error:
            self.error = error
        finally:
            self._sources = self._effects = _NOTHING

    def triggers(self) -> str:
        """Return the triggers that are present, as JSON."""
        on = self.reaction.on
        if len(on) == 1:
            return f"[{on[0].quoted}]"
        present = self._present
        return f"[{','.join([source.quoted for source in on if source in present])}]"

    def _refusal(self, element: Element[Any], verb: str) -> TopologyError:
        if self._sources is _NOTHING:
            return TopologyError(f"{element.path}: {self.reaction.path}, whose context this is, has returned")
        return TopologyError(f"{self.reaction.path} did not declare that it will {verb} {element.path}")


def refuse(element: Element[Any], value: Any) -> None:
    """Raise TypeError: the value is not of the element's type."""
    raise TypeError(f"{element.path}: expected {json.loads(element.form.name)}, got {value!r}")


Body = Callable[[Context], None]
"""The function of a reaction."""
