"""The states of a slot and their legal transitions. Pure: `Slot` owns its state, `EngineSteps` does the work of a transition.

    starting --> held <--> open        from every state: draining, asleep, quarantined
                  ^                    from every state but open: starting
    asleep -------'

Invariants: only an engine that was held is opened, so its weights were loaded and checked; an engine that failed, or is being
drained, serves again only after it was started, or put to sleep and woken.
"""

from __future__ import annotations

from typing import Literal, get_args

from headgate.errors import EngineError

SlotState = Literal["starting", "held", "open", "draining", "asleep", "quarantined"]
STATES: tuple[SlotState, ...] = get_args(SlotState)
_ANY = frozenset(STATES)
TRANSITIONS: dict[SlotState, frozenset[SlotState]] = {
    "starting": _ANY - {"open"},
    "held": frozenset({"starting", "held", "open", "asleep"}),
    "open": frozenset({"held", "open"}),
    "draining": _ANY,
    "asleep": _ANY,
    "quarantined": _ANY,
}
"""The states that each state may follow."""


def check_transition(engine: str, state: SlotState, reason: str, target: SlotState) -> None:
    """Raise EngineError if an engine that is in `state`, for `reason`, cannot become `target`."""
    if state not in TRANSITIONS[target]:
        known = f"{state} ({reason})" if reason else state
        raise EngineError(f"{engine} cannot become {target}: it is {known}")
