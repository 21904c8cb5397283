"""The messages by which one plan places the calls of all gateway processes.

Every process counts its calls (`CallCounts`). Once a second the coordinator sends each process a `Table`: the state of the
engines, the load of the other processes, and its decisions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from gateway.generation.call import Call
from gateway.generation.slot import Slot
from scheduler.policies.throughput import EngineModel
from scheduler.program.calls import EngineLoad, PeerLoad, PeerQueued, PeerRunning, Plan


@dataclass(frozen=True, slots=True)
class CallCounts:
    """One process's calls of a model."""

    queued: tuple[tuple[int, int, int], ...] = ()
    """Calls that wait for an engine: `min_version`, number of calls, sum of their tokens."""
    running: tuple[tuple[str, int, int], ...] = ()
    """Calls in engines: engine, `min_version`, number of calls."""


@dataclass(frozen=True, slots=True)
class Table:
    """The coordinator's snapshot of a model's engines, and its decisions."""

    engines: tuple[EngineLoad, ...]
    """`running` and `waiting` count the calls of every process."""
    plan: Plan
    speeds: Mapping[str, EngineModel] = field(default_factory=dict)
    """The fitted speed of engines."""
    peer_load: PeerLoad = field(default_factory=lambda: PeerLoad(1))
    """The load of all processes except for the receiver of the table."""

    def inside(self) -> Counter[str]:
        """Return the other processes' calls in each engine."""
        found: Counter[str] = Counter()
        for running in self.peer_load.running:
            found[running.engine] += running.calls
        return found


def count_calls(waiting: Iterable[Call], slots: Iterable[Slot]) -> CallCounts:
    """Count the calls that wait and those in engines."""
    queued: dict[int, tuple[int, int]] = {}
    for call in waiting:
        calls, tokens = queued.get(call.min_version, (0, 0))
        queued[call.min_version] = calls + 1, tokens + call.length
    running = Counter((slot.name, run.call.min_version) for slot in slots for run in slot.runs.values())
    return CallCounts(
        tuple((version, *counted) for version, counted in sorted(queued.items())),
        tuple((name, version, calls) for (name, version), calls in sorted(running.items())),
    )


def peer_load_of(counts: Collection[CallCounts]) -> PeerLoad:
    """Return the combined load of the other processes."""
    queued: dict[int, tuple[int, int]] = {}
    running: Counter[tuple[str, int]] = Counter()
    for one in counts:
        for version, calls, tokens in one.queued:
            before = queued.get(version, (0, 0))
            queued[version] = before[0] + calls, before[1] + tokens
        for name, version, calls in one.running:
            running[name, version] += calls
    return PeerLoad(
        1 + len(counts),
        tuple(PeerQueued(v, calls, tokens // calls) for v, (calls, tokens) in sorted(queued.items())),
        tuple(PeerRunning(name, version, calls) for (name, version), calls in sorted(running.items())),
    )
