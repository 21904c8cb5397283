"""Routes a call to the engine that has its prefix cached, if that outweighs the load there, else to the least loaded one.

A process uses it when it has no table from its coordinator, or when its control program has stopped; otherwise that program
chooses (`placement.py`).

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


def cached_key(running: int, cached: int) -> tuple[int, int]:
    """Order engines for a call, the best first: by load less the cached tokens; among equals the one with more cached."""
    return running * CALL_TOKENS - cached, -cached


def choose(engines: Sequence[EngineLoad], avoid: frozenset[str] = frozenset()) -> str | None:
    """Return the engine for a call; None if there is none. Engines in `avoid` are used only if there is no other.

    Among equals the first by name, so the choice depends on the arguments alone.
    """
    wanted = [engine for engine in engines if engine.name not in avoid] or list(engines)
    if not wanted:
        return None
    best = min(wanted, key=lambda e: (*cached_key(e.running, e.cached), e.name))
    return best.name
