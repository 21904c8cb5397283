"""`gateway serve` with round-robin placement, for comparison (`bench.routing`)."""

from __future__ import annotations

from collections import Counter
from weakref import WeakKeyDictionary

from gateway.cli import main
from scheduler.policies.open_engines import Engines
from scheduler.policies.placement import EngineRequest, OpenEngine

_turns: WeakKeyDictionary[Engines, Counter[str]] = WeakKeyDictionary()


def in_turn(engines: Engines, request: EngineRequest) -> OpenEngine | None:
    """Return the engine that may sample the call and has received the fewest."""
    given = _turns.setdefault(engines, Counter())
    legal = [engine for engine in engines.open.values() if engine.version >= request.version]
    if not legal:
        return None
    best = min(legal, key=lambda engine: (given[engine.name], engine.name))
    given[best.name] += 1
    return best


if __name__ == "__main__":
    Engines.best = in_turn  # type: ignore[method-assign,assignment]
    main()
