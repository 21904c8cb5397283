"""Events about calls from outside, and the control program's placements.

Events are arrivals, ends, and one snapshot of every engine per second; never tokens.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Arrived:
    """A call wants an engine: a new one, or one that an engine gave back."""

    call: str
    version: int
    """No older version may sample it: its group's `min_version`."""
    length: int
    """Tokens of its prompt and of what was sampled so far."""
    expected: int = 0
    """Tokens that are still to come, as predicted; 0: unknown."""
    near: str = ""
    """The engine that has `cached` of its tokens in its cache."""
    cached: int = 0
    avoid: tuple[str, ...] = ()
    """Engines to avoid while there is another."""
    pinned: bool = False
    """True if the call cannot leave its engine once it is there."""
    to: str = ""
    """The engine to use if it is open: the call was sent there, or waited for it."""


@dataclass(frozen=True, slots=True)
class CallDeparted:
    """A call has left its engine or the queue: it is over, or it arrives again."""

    call: str
    length: int
    """Tokens of its prompt and of what was sampled."""


@dataclass(frozen=True, slots=True)
class Demand:
    """The changes of calls since the last one, ends first."""

    left: tuple[CallDeparted, ...] = ()
    arrived: tuple[Arrived, ...] = ()


@dataclass(frozen=True, slots=True)
class Opened:
    """An engine runs this version, and takes calls."""

    engine: str
    version: int


@dataclass(frozen=True, slots=True)
class Closed:
    """An engine takes no calls: it is held, asleep, or gone."""

    engine: str


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """An engine's state, reported by itself or known otherwise."""

    engine: str
    running: int
    """Calls that it samples."""
    waiting: int
    """Calls in its own queue."""
    kv: int
    """Tokens in its cache that belong to running calls."""
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot of every open engine, once a second."""

    engines: tuple[EngineLoad, ...]


@dataclass(frozen=True, slots=True)
class PeerQueued:
    """Calls of one `min_version` that wait in other processes."""

    version: int
    calls: int
    length: int
    """Tokens of one, on average."""


@dataclass(frozen=True, slots=True)
class PeerRunning:
    """Calls of one `min_version` that other processes have in an engine."""

    engine: str
    version: int
    calls: int


@dataclass(frozen=True, slots=True)
class PeerLoad:
    """What other gateway processes have, where there are any. It comes just before the snapshot that counts their calls too."""

    processes: int
    """Those that place calls, this one included."""
    queued: tuple[PeerQueued, ...] = ()
    running: tuple[PeerRunning, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """What the coordinator has decided at its snapshot, for the processes that follow it."""

    newest: int
    """The newest version: calls of an older `min_version` are late."""
    pulling: tuple[str, ...] = ()
    """Engines that have to pull it, and are still open."""


@dataclass(frozen=True, slots=True)
class SpeedFitted:
    """The fitted speed of an engine (`scheduler.policies.throughput`)."""

    engine: str
    k1: float
    k2: float
    k3: float
    k4: float


@dataclass(frozen=True, slots=True)
class Placed:
    """A call goes to an engine."""

    call: str
    engine: str


@dataclass(frozen=True, slots=True)
class Move:
    """A call that runs in an engine is to be given back; it then arrives again. `to`: where it is expected to go."""

    call: str
    engine: str
    to: str = ""
