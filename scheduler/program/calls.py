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
    """Tokens that are still to come, as predicted; 0: nobody knows."""
    near: str = ""
    """The engine that has `cached` of its tokens in its cache."""
    cached: int = 0
    avoid: tuple[str, ...] = ()
    """Engines that it shall not go to while there is another."""
    pinned: bool = False
    """True if the call cannot leave its engine once it is there."""
    to: str = ""
    """The engine that it shall go to if that is open: it was sent there, or waited for it."""


@dataclass(frozen=True, slots=True)
class Left:
    """A call is in no engine any more, and waits for none: it is over, or it arrives anew."""

    call: str
    length: int
    """Tokens of its prompt and of what was sampled."""


@dataclass(frozen=True, slots=True)
class Demand:
    """The changes of calls since the last one, ends first."""

    left: tuple[Left, ...] = ()
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
class EngineSeen:
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
class Seen:
    """A snapshot of every open engine, once a second."""

    engines: tuple[EngineSeen, ...]


@dataclass(frozen=True, slots=True)
class Queued:
    """Calls of one `min_version` that wait in other processes."""

    version: int
    calls: int
    length: int
    """Tokens of one, on average."""


@dataclass(frozen=True, slots=True)
class Held:
    """Calls of one `min_version` that other processes have in an engine."""

    engine: str
    version: int
    calls: int


@dataclass(frozen=True, slots=True)
class Others:
    """What other gateway processes have, where there are any. It comes just before the snapshot that counts their calls too."""

    processes: int
    """Those that place calls, this one included."""
    queued: tuple[Queued, ...] = ()
    held: tuple[Held, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """What the coordinator has decided at its snapshot, for the processes that follow it."""

    newest: int
    """The newest version: calls of an older `min_version` are late."""
    pulling: tuple[str, ...] = ()
    """Engines that were told to pull it, and are still open."""


@dataclass(frozen=True, slots=True)
class Fitted:
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
    """A call that runs in an engine is to be given back; it then arrives anew. `to`: where it is expected to go."""

    call: str
    engine: str
    to: str = ""
