"""Routes a call to the engine that has its prefix cached, if that outweighs the load there, else to the least loaded one.

Followers choose by it, and a process whose control program has stopped; otherwise the control program chooses (`placement.py`).

One more running call slows an engine's others about as much as the prefill of `CALL_TOKENS` tokens does; so a long conversation
stays where it is, a short one goes where there is room, and neither piles up. (Cache-aware routers, SGLang's among them, switch
between the two rules at a threshold instead.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CALL_TOKENS = 256


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """An engine that would take the call."""

    name: str
    running: int
    """Calls in the engine."""
    cached: int = 0
    """Tokens of the call's prompt that the engine is believed to have cached."""


def choose(engines: Sequence[EngineLoad], avoid: frozenset[str] = frozenset()) -> str | None:
    """The engine for a call; None if there is none. `avoid` is avoided while there is another.

    Among equals the one with more of the prompt cached, then the first by name: the choice depends on the arguments alone.
    """
    wanted = [engine for engine in engines if engine.name not in avoid] or list(engines)
    if not wanted:
        return None
    best = min(wanted, key=lambda e: (e.running * CALL_TOKENS - e.cached, -e.cached, e.name))
    return best.name
