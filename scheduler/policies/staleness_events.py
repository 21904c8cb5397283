"""What can happen to the staleness ledger (events) and what it decides (commands): frozen values with a JSON form."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

RefuseReason = Literal[
    "no_slot", "size_differs", "group_full", "group_closed", "group_finished", "episode_finished", "not_stuck"
]
StuckAction = Literal["retry", "truncate"]


# Events


@dataclass(frozen=True, slots=True)
class Join:
    """An episode wants to start in a group that is trained on `size` members."""

    group_id: str
    episode_id: str
    size: int


@dataclass(frozen=True, slots=True)
class Finish:
    """An episode's run is over and its reward is being computed: it keeps its place until `Reward` or `Drop`."""

    episode_id: str


@dataclass(frozen=True, slots=True)
class Reward:
    """An episode's final reward is there. `value` is what groups of equal rewards are told by."""

    episode_id: str
    value: float | None = None


@dataclass(frozen=True, slots=True)
class Drop:
    """An episode will never be rewarded."""

    episode_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class CloseGroup:
    """No further member will join: those that are missing count as dropped. Without effect on a finished group."""

    group_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Leased:
    """The trainer works on buffer `consumed`. Once the buffer is full, a `Publish` no longer skips it."""

    buffer: int


@dataclass(frozen=True, slots=True)
class Consume:
    """Buffer `consumed`, which is full, was trained."""

    buffer: int


@dataclass(frozen=True, slots=True)
class Publish:
    """`version`, greater than all before, is the newest."""

    version: int


@dataclass(frozen=True, slots=True)
class Unstick:
    """Buffer `consumed` has been STUCK for too long: its last groups are given up, and others may start for it (`retry`), or the
    buffer is trained without them (`truncate`)."""

    buffer: int
    action: StuckAction


Event = Join | Finish | Reward | Drop | CloseGroup | Leased | Consume | Publish | Unstick


# Commands


@dataclass(frozen=True, slots=True)
class Admit:
    """The episode may start; `version` is its group's V."""

    episode_id: str
    group_id: str
    buffer: int
    version: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """The event changed nothing."""

    episode_id: str
    reason: RefuseReason


@dataclass(frozen=True, slots=True)
class MemberDropped:
    """The fate of an episode by its own `Drop`, whatever becomes of its group."""

    episode_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Occupied:
    """The fate of the group and of its rewarded members: entry `entry` (from 0) of `buffer`."""

    group_id: str
    buffer: int
    entry: int


@dataclass(frozen=True, slots=True)
class GroupDropped:
    """The fate of the group and of all members that have none yet: `too_few_rewards`, or `stale` (no buffer is left to it)."""

    group_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class AbortEpisode:
    """The episode still runs, in vain. Its fate is told by its group's `GroupDropped`."""

    episode_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Moved:
    """The group's reservation is now in a later buffer."""

    group_id: str
    from_buffer: int
    to_buffer: int


@dataclass(frozen=True, slots=True)
class BufferReady:
    """The last entry of the buffer was occupied."""

    buffer: int


@dataclass(frozen=True, slots=True)
class Consumed:
    """The buffer was trained, with its groups in order of entry."""

    buffer: int
    group_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Skipped:
    """Buffers `first` up to but without `until` will never be trained, nor the groups that occupied them."""

    first: int
    until: int
    group_ids: tuple[str, ...]


Command = (
    Admit | Refuse | MemberDropped | Occupied | GroupDropped | AbortEpisode | Moved | BufferReady
    | Consumed | Skipped
)  # fmt: skip

_EVENTS = {t.__name__: t for t in (Join, Finish, Reward, Drop, CloseGroup, Leased, Consume, Publish, Unstick)}


def event_to_json(event: Event) -> dict[str, Any]:
    """The event's fields, and its class name as `type`."""
    return {"type": type(event).__name__, **asdict(event)}


def event_from_json(value: dict[str, Any]) -> Event:
    """The inverse of `event_to_json`. Raises ValueError if `value` is no event."""
    fields = dict(value)
    kind = _EVENTS.get(fields.pop("type", ""))
    if kind is None:
        raise ValueError(f"no event of the ledger: {value}")
    try:
        event: Event = kind(**fields)
    except TypeError as error:
        raise ValueError(f"not the fields of {kind.__name__}: {value}") from error
    return event


def command_to_json(command: Command) -> dict[str, Any]:
    """The command's fields, and its class name as `type`."""
    return {"type": type(command).__name__, **asdict(command)}
