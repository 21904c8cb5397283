"""A turn against an engine that samples, is updated under its requests, and delivers late."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.trajectories.turn import Span, Turn


@dataclass
class World:
    """The truth: which version sampled each token, and how many have arrived."""

    turn: Turn = field(default_factory=lambda: Turn("call"))
    truth: list[int] = field(default_factory=list)
    arrived: int = 0
    started: int = 0
    version: int = 0
    stale: dict[int, bool] = field(default_factory=dict)

    def begin(self) -> None:
        self.started = len(self.truth)
        self.turn.begin_run(self.version)

    def sample(self, count: int) -> None:
        self.truth += [self.version] * count

    def deliver(self, count: int) -> None:
        new = list(range(self.arrived, min(self.arrived + count, len(self.truth))))
        self.arrived += len(new)
        self.turn.append(new, [-float(i) for i in new])

    def update(self, count: int) -> None:
        for _ in range(count):
            self.version += 1
            self.turn.weights_changed(self.version)

    def account(self) -> list[tuple[str, int]]:
        return [(str(v), len(list(run))) for v, run in groupby(self.truth[self.started :])]

    def end(self, known: bool) -> None:
        self.deliver(len(self.truth))
        self.turn.end_run(self.account() if known else None)


def spans(turn: Turn) -> list[Span]:
    """Return the span of every token."""
    return [span for span in turn.spans for _ in range(span.count)]


actions = st.lists(
    st.one_of(
        st.tuples(st.just("sample"), st.integers(1, 4)),
        st.tuples(st.just("deliver"), st.integers(1, 5)),
        st.tuples(st.just("update"), st.integers(1, 2)),
        st.tuples(st.just("end"), st.booleans()),
    ),
    max_size=25,
)


def play(steps: list[tuple[str, int]]) -> World:
    world = World()
    world.begin()
    for name, value in steps:
        if name == "end":
            world.end(bool(value))
            world.begin()
        else:
            {"sample": world.sample, "deliver": world.deliver, "update": world.update}[name](value)
    return world


@given(actions)
def test_the_truth_is_always_within_the_interval(steps: list[tuple[str, int]]) -> None:
    world = play(steps)
    found = spans(world.turn)
    assert len(found) == world.arrived == len(world.turn.ids) == len(world.turn.logprobs)
    assert not world.turn.disputed
    for span, version in zip(found, world.truth, strict=False):
        assert span.version <= version <= span.newest
    assert all(span.count > 0 for span in world.turn.spans)


@given(actions)
def test_the_engines_account_makes_everything_exact(steps: list[tuple[str, int]]) -> None:
    world = play([(name, True if name == "end" else value) for name, value in steps])
    world.end(True)
    found = spans(world.turn)
    assert [(span.version, span.newest) for span in found] == [(v, v) for v in world.truth]


@given(actions, st.data())
def test_an_account_that_cannot_be_true_is_not_believed(
    steps: list[tuple[str, int]], data: st.DataObject
) -> None:
    world = play([step for step in steps if step[0] != "end"])
    world.deliver(len(world.truth))
    before = list(world.turn.spans)
    account = world.account()
    lies = [
        [*account, (str(world.version), 1)],
        [("default", n) for _, n in account] or [("default", 0)],
        [(str(world.version + 1), n) for _, n in account] or [("x", 0)],
    ]
    if len(account) > 1:
        lies.append(account[::-1])
        lies.append(account[:-1])
    world.turn.end_run(data.draw(st.sampled_from(lies)))
    assert world.turn.disputed
    assert world.turn.spans == before


@given(actions, st.integers(0, 40))
def test_a_turn_cut_short_forgets_the_end_and_nothing_else(steps: list[tuple[str, int]], count: int) -> None:
    world = play(steps)
    before = spans(world.turn)
    world.turn.truncate(count)
    assert world.turn.ids == list(range(min(count, world.arrived)))
    assert [(s.version, s.newest) for s in spans(world.turn)] == [
        (s.version, s.newest) for s in before[:count]
    ]


def test_tokens_before_the_first_crossing_are_certain() -> None:
    turn = Turn("call")
    turn.begin_run(3)
    turn.append([1, 2], [-1.0, -1.0])
    assert not turn.weights_have_changed
    turn.weights_changed(4)
    assert turn.weights_have_changed
    turn.append([3], [-1.0])
    turn.end_run(None)
    assert turn.spans == [Span(3, 2, 3), Span(3, 1, 4)]
    assert [span.confirmed for span in turn.spans] == [True, False]


@pytest.mark.parametrize("restarted", [False, True])
def test_a_restart_forgets_everything(restarted: bool) -> None:
    turn = Turn("call")
    turn.begin_run(0)
    turn.append([1], [-1.0])
    turn.end_run([("7", 1)])
    assert turn.disputed
    if restarted:
        turn.restart()
    assert (turn.ids, turn.spans, turn.disputed) == (
        ([], [], False) if restarted else ([1], [Span(0, 1, 0)], True)
    )
