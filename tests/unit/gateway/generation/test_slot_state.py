"""The states of a slot: what may follow what, and what a refused transition leaves unchanged."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from unittest.mock import AsyncMock

import pytest

from gateway.generation.slot import Slot
from gateway.generation.slot_state import STATES, SlotState
from headgate.errors import EngineError

METHODS: dict[str, Callable[[Slot], None]] = {
    "start": Slot.start,
    "hold": Slot.hold,
    "confirm": lambda slot: slot.confirm(4),
    "drain": Slot.drain,
    "sleep": Slot.sleep,
    "wake": Slot.wake,
    "fail": lambda slot: slot.fail("it died"),
}


def in_state(state: SlotState) -> Slot:
    slot = Slot("e")
    slot.mirror_state(state, "", 3, 1)
    return slot


def test_an_engine_opens_only_after_it_was_held_and_serves_again_only_after_it_was_started() -> None:
    for methods in itertools.product(METHODS, repeat=4):
        slot, out_of_service = Slot("e"), False
        for method in methods:
            before = slot.state, slot.version, slot.generation, slot.adapters, slot.given_up
            try:
                METHODS[method](slot)
            except EngineError:
                after = slot.state, slot.version, slot.generation, slot.adapters, slot.given_up
                assert after == before, methods
                continue
            if slot.state == "open":
                assert before[0] in ("held", "open") and not out_of_service, methods
            restored = slot.state in ("starting", "asleep")
            out_of_service = slot.state in ("quarantined", "draining") or (out_of_service and not restored)


@pytest.mark.parametrize("state", STATES)
def test_every_engine_can_fail_and_every_one_but_an_open_one_can_be_started(state: SlotState) -> None:
    slot = in_state(state)
    if state == "open":
        with pytest.raises(EngineError, match="cannot become starting: it is open"):
            slot.start()
    slot.fail("it died", given_up=True)
    assert (slot.state, slot.reason, slot.given_up) == ("quarantined", "it died", True)
    with pytest.raises(EngineError, match=r"e cannot become open: it is quarantined \(it died\)"):
        slot.confirm(4)
    slot.start()
    slot.hold()
    slot.confirm(4)
    assert (slot.state, slot.version, slot.given_up) == ("open", 4, False)


def test_a_follower_shows_every_state_that_the_coordinator_reports() -> None:
    for before, after in itertools.product(STATES, STATES):
        slot = in_state(before)
        slot.mirror_state(after, "why", 5, 9)
        assert (slot.state, slot.reason, slot.generation) == (after, "why", 9)
        assert slot.version == (5 if after == "open" else 3 if before == "open" else -1)


@pytest.mark.parametrize(("state", "grace_s"), [("asleep", 0.0), ("open", 10.0)])
async def test_an_engine_that_fails_to_sleep_is_stopped_without_a_grace_period(
    state: SlotState, grace_s: float
) -> None:
    slot, process = in_state(state), AsyncMock()
    slot.set_process(process)
    slot.fail("it does not go to sleep")
    await slot.stop_to_restart()
    process.stop.assert_awaited_once_with(grace_s)
    assert (slot.restarts, slot.engine, slot.process) == (1, None, None)
