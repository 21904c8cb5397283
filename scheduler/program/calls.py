"""Events about calls from outside, and the control program's placements.

Events are arrivals, ends, and one snapshot of every engine per second; never tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.policies.throughput import EngineModel


@dataclass(frozen=True, slots=True)
class Arrived:
    """A call needs an engine: a new call, or one that an engine gave back."""

    call: str
    version: int
    """The oldest version that may sample it: its group's `min_version`."""
    length: int
    """Tokens of its prompt and of what was sampled so far."""
    cached_in: str = ""
    """The engine that has most of its tokens in its cache."""
    cached: int = 0
    """The number of these tokens."""
    avoid: tuple[str, ...] = ()
    """Engines to avoid while there is another."""
    pinned: bool = False
    """True if the call cannot move to another engine once it runs."""
    preferred: str = ""
    """The engine to use if it is open, because the call was sent to it or waited for it."""


@dataclass(frozen=True, slots=True)
class CallDeparted:
    """A call has left its engine or the queue: it has ended, or arrives again."""

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
    """An engine runs this version, and accepts calls."""

    engine: str
    version: int
    zone: str = ""
    """The network zone of its node."""


@dataclass(frozen=True, slots=True)
class Closed:
    """An engine accepts no calls: it is held, asleep, or dead."""

    engine: str


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """An engine's load, by its own report or by the gateway's count."""

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
    """The calls of other gateway processes. Sent just before the snapshot, which counts these calls too."""

    processes: int
    """The number of processes that place calls, including this one."""
    queued: tuple[PeerQueued, ...] = ()
    running: tuple[PeerRunning, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """The coordinator's decisions at its snapshot, for its followers."""

    newest: int
    """The newest version: calls of an older `min_version` are late."""
    pulling: tuple[str, ...] = ()
    """Engines that were commanded to pull it and are still open."""


@dataclass(frozen=True, slots=True)
class SpeedFitted:
    """The fitted speed of an engine (`scheduler.policies.throughput`)."""

    engine: str
    model: EngineModel


@dataclass(frozen=True, slots=True)
class Placed:
    """A call goes to an engine."""

    call: str
    engine: str


@dataclass(frozen=True, slots=True)
class Move:
    """The command that an engine give a running call back, which then arrives again."""

    call: str
    engine: str
    target: str = ""
    """The engine that the call is expected to get."""
