"""Coordinators that succeed one another on one store, some of which do not know yet that they have a successor."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Generic, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from sqlalchemy import Engine

from tests.faults.virtual.clock import Clock, VirtualLoop
from tests.faults.virtual.stores import HandDatabase, open_store


class Coordinator:
    """One process's time as the coordinator. It may continue in vain after its successor has begun."""

    def __init__(self, name: str, store: Engine, loop: VirtualLoop) -> None:
        self.database = HandDatabase(store, loop)
        self.fenced = self.database.fenced(self.database.claim(name))

    async def open(self) -> None:
        """Memory, from the store alone."""
        self.database.at_once = True
        await self.load()
        self.database.at_once = False

    async def load(self) -> None:
        """Make what only the coordinator has."""
        raise NotImplementedError


C = TypeVar("C", bound=Coordinator)


class SuccessionMachine(RuleBasedStateMachine, Generic[C]):
    """A machine whose steps call a coordinator or the one before it."""

    stack: ExitStack | None = None
    make: Callable[[str, Engine, VirtualLoop], C]

    def begin(self, stack: ExitStack, url: str) -> None:
        """Open the store at `url`; the first coordinator has memory of it."""
        self.stack = stack
        self.store = open_store(url)
        stack.callback(self.store.dispose)
        self.clock = Clock()
        self.loop = VirtualLoop(self.clock)
        stack.callback(self.loop.end)
        self.named = 0
        self.coordinators: list[C] = []

    @property
    def now(self) -> C:
        """The present coordinator."""
        return self.coordinators[-1]

    def one(self, old: bool) -> C:
        """Return the present coordinator, or with `old` the one before it, if there was any."""
        return self.coordinators[-2] if old and len(self.coordinators) > 1 else self.now

    def succeed(self) -> None:
        """Make another process the coordinator."""
        self.named += 1
        self.coordinators.append(self.make(f"c{self.named}", self.store, self.loop))
        for gone in self.coordinators[
            :-2
        ]:  # rules call the last two alone, and the store has few connections
            gone.database.die()
        self.loop.run(self.now.open())

    @rule(old=st.booleans(), count=st.integers(1, 4))
    def commit(self, old: bool, count: int) -> None:
        self.one(old).database.commit(count)
        self.loop.settle()

    @rule(dies=st.booleans())
    def another_coordinates(self, dies: bool) -> None:
        """Replace the coordinator, which dies or does not know yet."""
        if dies:
            self.now.database.die()
        self.succeed()

    def look(self, query: Any) -> Any:
        """Read the committed rows."""
        return self.now.database.look(query)

    def close(self) -> None:
        """End everything."""
        assert self.stack is not None
        for coordinator in self.coordinators:
            coordinator.database.die()
        self.stack.close()
