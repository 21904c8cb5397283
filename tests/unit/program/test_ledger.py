"""The ledger as a reactor: it answers what the rule answers, goes on from a state, and a recording of it replays."""

from __future__ import annotations

import io
from typing import Any

import pytest

from scheduler.policies import rules
from scheduler.policies.staleness import LedgerSettings
from scheduler.policies.staleness_events import Consume, Event, Join, Publish, Reward
from scheduler.program import ControlProgram
from scheduler.program.ledger import described
from scheduler.reactor import Recording, Runtime, VirtualClock, replay

EVENTS: list[Event] = [
    Join("g0", "e0", 1),
    Join("g1", "e1", 1),
    Join("g2", "e2", 1),  # refused: eta is 1
    Reward("e1", 1.0),
    Consume(1),  # impossible
    Reward("e0", 0.5),
    Consume(0),
    Publish(1),
    Join("g3", "e3", 1),
]


class _Kept(io.BytesIO):
    def close(self) -> None:
        """Read afterwards."""


def run(settings: dict[str, Any], events: list[Event], file: _Kept) -> list[object]:
    """What was answered to each event."""
    program = ControlProgram(settings)
    runtime = Runtime(program, VirtualClock(), Recording(file, settings))
    answers: list[object] = []
    ledger = program.ledgers["m"]
    runtime.observe(ledger.decided, lambda _tag, commands: answers.append(list(commands)))
    runtime.observe(ledger.impossible, lambda _tag, message: answers.append(message))
    runtime.start()
    for event in events:
        runtime.inject(ledger.told, event)
        runtime.advance()
    return answers


@pytest.mark.parametrize("name", sorted(rules.RULES))
@pytest.mark.parametrize("cut", range(len(EVENTS) + 1))
def test_a_program_that_goes_on_from_a_state_decides_what_the_rule_decides(name: str, cut: int) -> None:
    pure = rules.create(name, LedgerSettings(eta=1, batch=1, min_members=1))
    for event in EVENTS[:cut]:
        _answer(pure, event)
    file = _Kept()
    settings = {"models": {"m": {"ledger": described(name, pure)}}}
    assert run(settings, EVENTS[cut:], file) == [_answer(pure, event) for event in EVENTS[cut:]]
    report = replay(file.getvalue().decode().splitlines(), ControlProgram)
    assert report.equal
    assert report.decisions == len(EVENTS) - cut


def test_a_recording_whose_ledger_decided_otherwise_is_told() -> None:
    file = _Kept()
    limits = {"eta": 1, "batch": 1, "min_members": 1}
    run({"models": {"m": {"ledger": {"rule": "staleflow", "settings": limits}}}}, EVENTS, file)
    lines = file.getvalue().decode().replace('"buffer":1', '"buffer":0', 1).splitlines()
    assert not replay(lines, ControlProgram).equal


def _answer(rule: rules.StalenessRule, event: Event) -> object:
    try:
        return rule.apply(event)
    except ValueError as error:
        return str(error)
