"""What a reaction may do while it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from scheduler.reactor.clock import Tag
from scheduler.reactor.elements import Effect, LogicalAction, Output, Reaction, Source, TopologyError

if TYPE_CHECKING:
    from scheduler.reactor.runtime import Runtime

T = TypeVar("T")


class Context:
    """One reaction at one tag. Raises TopologyError for what the reaction did not declare, and once it has returned."""

    def __init__(self, runtime: Runtime, reaction: Reaction, tag: Tag) -> None:
        self.tag = tag
        self._runtime = runtime
        self._reaction: Reaction | None = reaction

    def get(self, source: Source[T]) -> T | None:
        """The value at this tag, or None if it is absent."""
        self._allow(source, "see")
        value: T | None = self._runtime.present.get(source)
        return value

    def __getitem__(self, source: Source[T]) -> T:
        """The value at this tag, of a source that is known to be present. Raises KeyError if it is absent."""
        self._allow(source, "see")
        found: T = self._runtime.present[source]
        return found

    def present(self, source: Source[Any]) -> bool:
        """Whether there is a value at this tag: the way to ask for STARTUP, which has none."""
        self._allow(source, "see")
        return source in self._runtime.present

    def set(self, port: Output[T], value: T, why: str = "") -> None:
        """Sends a value, at this tag. Raises TopologyError if the port has one already, TypeError if it is of another type."""
        self._runtime.emit(self._allow(port, "write"), port, value, why)

    def schedule(self, action: LogicalAction[T], value: T, after: int = 0) -> None:
        """The action is present `after` ns later, or at the next microstep; behind what was scheduled for that tag before."""
        self._allow(action, "write")
        self._runtime.defer(action, value, after)

    def close(self) -> None:
        """The reaction has returned."""
        self._reaction = None

    def _allow(self, element: Source[Any] | Effect[Any], verb: str) -> Reaction:
        reaction = self._reaction
        if reaction is None:
            raise TopologyError(
                f"{element.path}: the reaction that used this context at {self.tag} has returned"
            )
        if element not in (reaction.sources if verb == "see" else reaction.effects):
            raise TopologyError(f"{reaction.path} did not declare that it will {verb} {element.path}")
        return reaction
