"""Calls and engines for the tests of placement."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from scheduler.program import ControlProgram
from scheduler.program.calls import (
    Arrived,
    CallDeparted,
    Closed,
    Demand,
    EngineLoad,
    Move,
    Opened,
    Placed,
    Snapshot,
)
from scheduler.program.events import Added, Published, Started
from scheduler.reactor import SECOND, Runtime, VirtualClock
from scheduler.reactor.elements import PhysicalAction

MODEL = "actor"


ENGINE = {"s_per_kv_token": 0.0, "s_per_batch": 1.0, "s_per_call": 0.5, "s_per_step": 1.0}
"""Has room for three calls, with min_gain_share = 0.3 (`tests/unit/scheduler/policies/test_placement.py`)."""


class Field:
    """A model's engines and calls, as the placement receives them. No engine carries out the steps of updates."""

    def __init__(
        self,
        order: str = "rolling",
        mode: str = "abort",
        choice: dict[str, Any] | None = None,
        **placement: Any,
    ) -> None:
        given = {
            "choice": {"rule": "gain", "min_gain_share": 0.3, "late_call_weight": 1.0} | (choice or {}),
            "engine": ENGINE,
            **placement,
        }
        update = {"order": order, "mode": mode}
        self.program = ControlProgram({"models": {MODEL: {"update": update, "placement": given}}})
        self.reactor = self.program.placements[MODEL]
        self.clock = VirtualClock()
        self.runtime = Runtime(self.program, self.clock)
        self.open: dict[str, int] = {}
        self.placed: dict[str, str] = {}
        """Where calls are that have not left."""
        self.wanted: dict[str, Arrived] = {}
        self.moves: list[Move] = []
        self.pulled: list[str] = []
        self.runtime.observe(self.reactor.placed, self._on_placed)
        self.runtime.observe(self.reactor.moves, lambda _tag, moves: self.moves.extend(moves))
        self.runtime.observe(self.reactor.pull, lambda _tag, names: self.pulled.extend(names))
        self.runtime.start()
        self.runtime.advance()
        self.inject(self.reactor.started, Started(0))
        self.inject(self.program.updates[MODEL].started, Started(0))

    def inject(self, action: PhysicalAction[Any], value: Any) -> None:
        self.runtime.inject(action, value)
        self.runtime.advance()

    def opens(self, **versions: int) -> Field:
        for name, version in versions.items():
            self.open[name] = version
            self.inject(self.reactor.opened, Opened(name, version))
        return self

    def closes(self, *names: str) -> Field:
        for name in names:
            self.open.pop(name, None)
            self.inject(self.reactor.closed, Closed(name))
        return self

    def arrive(self, *calls: Arrived) -> Field:
        self.wanted.update((call.call, call) for call in calls)
        self.inject(self.reactor.demand, Demand((), calls))
        return self

    def leave(self, *names: str) -> Field:
        for name in names:
            self.placed.pop(name, None)
            self.wanted.pop(name, None)
        self.inject(self.reactor.demand, Demand(tuple(CallDeparted(name, 20) for name in names)))
        return self

    def second(self, *seen: EngineLoad) -> Field:
        self.runtime.run_until(self.clock.now() + SECOND)
        self.inject(self.reactor.snapshot, Snapshot(seen))
        return self

    def publish(self, version: int) -> Field:
        self.inject(self.program.updates[MODEL].published, Published(version))
        return self

    def _on_placed(self, _tag: object, placed: tuple[Placed, ...]) -> None:
        for one in placed:
            call = self.wanted.pop(one.call)  # it waited, and is placed once
            assert one.call not in self.placed
            assert one.engine in self.open
            assert self.open[one.engine] >= call.version
            self.placed[one.call] = one.engine


def calls(*names: str, version: int = 0, **fields: Any) -> list[Arrived]:
    return [Arrived(name, version, 10, **fields) for name in names]


ENGINES = st.sampled_from(["a", "b", "c"])
CALLS = st.sampled_from([f"c{i}" for i in range(12)])
HAPPENS = st.one_of(
    st.tuples(st.just("open"), ENGINES, st.integers(0, 3)),
    st.tuples(st.just("close"), ENGINES, st.just(0)),
    st.tuples(st.just("gone"), ENGINES, st.just(0)),
    st.tuples(st.just("arrive"), CALLS, st.integers(0, 3)),
    st.tuples(st.just("arrive"), CALLS, st.integers(0, 3)),
    st.tuples(st.just("leave"), CALLS, st.just(0)),
    st.tuples(st.just("seen"), ENGINES, st.integers(0, 6)),
    st.tuples(st.just("second"), st.just(""), st.just(0)),
    st.tuples(st.just("publish"), st.just(""), st.just(0)),
)


def happen(field: Field, what: str, name: str, number: int) -> None:
    """Perform one of `HAPPENS`."""
    match what:
        case "open":
            field.opens(**{name: number})
        case "close":
            field.closes(name)
        case "gone":
            field.inject(
                field.program.fleets[MODEL].added, Added(name)
            )  # the fleet reports it the first time
            field.closes(name)
        case "arrive":
            field.placed.pop(name, None)  # if it is inside, it arrives again
            field.arrive(Arrived(name, number, 10 * (number + 1), "a", 5, ("b",)))
        case "leave":
            field.leave(name)
        case "seen":
            field.second(EngineLoad(name, number, max(0, number - 3), 10 * number, 1.0))
        case "second":
            field.second()
        case _:
            field.publish(3)
