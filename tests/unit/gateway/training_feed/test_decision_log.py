"""Whatever happens, each event leaves a reason, and each episode's story ends as it did in the ledger."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.observe.explain import explain, verdict
from gateway.store.decisions import Decision
from gateway.training_feed.decision_log import DecisionLog
from scheduler.policies.staleflow import StaleFlow
from scheduler.policies.staleness_events import (
    CloseGroup,
    Consume,
    Consumed,
    Drop,
    Event,
    Finish,
    GroupDropped,
    Join,
    Leased,
    Publish,
    Refuse,
    Returned,
    Reward,
    Skipped,
    Unstick,
)
from scheduler.policies.staleness_state import LedgerSettings

groups = st.integers(0, 5).map(lambda n: f"g{n}")
episodes = st.integers(0, 3)
"""Episodes that run, by age; beyond that, those that ever joined."""
steps = st.one_of(
    st.tuples(st.just("join"), groups),
    st.tuples(st.just("join"), groups),
    st.tuples(st.sampled_from(["finish", "drop"]), episodes),
    st.tuples(st.just("reward"), episodes, st.sampled_from([0.0, 1.0])),
    st.tuples(st.just("reward"), episodes, st.sampled_from([0.0, 1.0])),
    st.tuples(st.just("close"), groups),
    st.tuples(st.sampled_from(["lease", "return", "consume", "consume", "publish"])),
    st.tuples(st.just("unstick"), st.sampled_from(["retry", "truncate"])),
)
extras = st.fixed_dictionaries(
    {
        "spare_groups": st.integers(0, 2),
        "spare_members": st.integers(0, 1),
        "drop_equal": st.booleans(),
        "late_groups": st.sampled_from(["cancel", "drop", "mask", "overtake"]),
    }
)


class World:
    """A rule and its decisions. Computes by itself which episodes were trained: the rewarded ones of a consumed group."""

    def __init__(self, limits: LedgerSettings) -> None:
        self.ledger = StaleFlow(limits)
        self.decision_log = DecisionLog()
        self.rows: list[dict[str, Any]] = []
        self.group_of: dict[str, str] = {}
        self.rewarded: set[str] = set()
        self.trained: dict[str, int] = {}
        self.joined = 0

    def episode(self, which: int) -> str:
        running = [
            e for g in self.ledger.groups() for e, state in g.members.items() if state in ("open", "grading")
        ]
        return f"e{which}" if which >= len(running) else running[which]

    def event(self, step: tuple[Any, ...]) -> Event:
        match step:
            case ("join", group):
                self.joined += 1
                return Join(group, f"e{self.joined - 1}", 1 + (group > "g2"))
            case ("finish", episode):
                return Finish(self.episode(episode))
            case ("drop", episode):
                return Drop(self.episode(episode), "crashed")
            case ("reward", episode, value):
                return Reward(self.episode(episode), value)
            case ("close", group):
                return CloseGroup(group, "members_missing")
            case ("lease",):
                return Leased(self.ledger.next_batch)
            case ("return",):
                return Returned(self.ledger.next_batch)
            case ("consume",):
                return Consume(self.ledger.next_batch)
            case ("publish",):
                return Publish(self.ledger.version + 1)
            case ("unstick", action):
                return Unstick(self.ledger.next_batch, action)
        raise AssertionError(step)

    def take(self, event: Event) -> None:
        try:
            commands = self.ledger.apply(event)
        except ValueError:
            return
        if any(isinstance(command, Refuse) for command in commands):
            return
        decisions = self.decision_log.record(event, commands)
        if isinstance(event, Join):
            self.group_of[event.episode_id] = event.group_id
        if isinstance(event, Reward):
            self.rewarded.add(event.episode_id)
        for command in commands:
            if isinstance(command, Consumed):
                gone = {e for e in self.rewarded if self.group_of[e] in command.group_ids}
                self.trained |= dict.fromkeys(gone, command.batch)
                self.rewarded -= gone
            if isinstance(command, Skipped):
                self.rewarded -= {e for e in self.rewarded if self.group_of[e] in command.group_ids}
            if isinstance(command, GroupDropped):
                self.rewarded -= {e for e in self.rewarded if self.group_of[e] == command.group_id}
        if isinstance(event, Join | Finish | Reward | Drop):
            assert [d for d in decisions if d.episode_id == event.episode_id], (event, commands)
        self.rows += [row(decision) for decision in decisions]

    def story(self, episode_id: str) -> tuple[list[dict[str, Any]], str]:
        own = {r["group_id"] for r in self.rows if r["episode_id"] == episode_id}
        mine = [
            r
            for r in self.rows
            if r["episode_id"] == episode_id or (not r["episode_id"] and r["group_id"] in own)
        ]
        story = explain(mine, episode_id)
        return story, verdict(episode_id, {"mode": "train"}, story, 1, 0)


def row(decision: Decision) -> dict[str, Any]:
    fields = ("kind", "group_id", "episode_id", "reason", "batch", "entry", "details")
    return {"at": 0.0, **{name: getattr(decision, name) for name in fields}}


def check(world: World) -> None:
    now = {group.group_id: group for group in world.ledger.groups()}
    for episode in world.group_of:
        story, words = world.story(episode)
        fates = [s for s in story if s["kind"] in ("trained", "skipped", "dropped")]
        if episode in world.trained:
            assert (
                words == f"trained in batch {world.trained[episode]} as version {world.trained[episode] + 1}"
            )
            continue
        assert not words.startswith("trained")
        group = now.get(world.group_of[episode])
        state = group.members.get(episode) if group is not None else None
        if group is None or state is None or group.state == "dropped" or state == "dropped":
            assert words.startswith("not trained, because "), (episode, story)
            assert fates
        elif group.state == "occupied" and state == "rewarded":
            assert words.startswith(f"waiting in batch {group.batch}, as number "), (words, story)
            assert not fates
        elif group.state == "reserved":
            assert words.startswith("still running"), (words, story)
            assert not fates


@settings(max_examples=80)
@given(st.lists(steps, min_size=20, max_size=60), st.integers(0, 2), st.integers(1, 2), extras)
def test_every_event_leaves_a_reason(
    script: list[tuple[Any, ...]], eta: int, batch: int, extra: dict[str, Any]
) -> None:
    if extra["late_groups"] == "overtake":
        extra = {**extra, "spare_groups": 0}
    world = World(LedgerSettings(eta, batch, 1, stuck_groups=2, **extra))
    for step in script:
        world.take(world.event(step))
    check(world)


def test_a_group_that_is_passed_over_was_in_its_batch_until_a_version() -> None:
    world = World(LedgerSettings(0, 1, 1))
    for event in (Join("g", "m", 1), Reward("m", 1.0), Publish(3)):
        world.take(event)
    last = world.rows[-1]
    assert (last["kind"], last["group_id"], last["batch"], last["details"]) == (
        "skipped", "g", 0, {"first": 0, "until": 3}
    )  # fmt: skip


def test_the_decision_log_forgets_what_is_over() -> None:
    world = World(LedgerSettings(0, 1, 1))
    for number in range(50):
        for member in range(2):
            world.take(Join(f"g{number}", f"m{number}-{member}", 2))
            world.take(Reward(f"m{number}-{member}", float(member)))
        world.take(Consume(number))
        world.take(Publish(number + 1))
    assert len(world.trained) == 100
    check(world)
    assert not world.decision_log._entries
    assert not world.decision_log._group_of
