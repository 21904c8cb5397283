"""Events and commands of the staleness ledger: frozen values with a JSON form.

A group is dropped (`GroupDropped`) for one of these reasons: too_few_rewards; zero_variance (its rewards are equal, so it teaches
nothing); nothing_to_train (no token of its rewarded members can be trained); stale (its batch was skipped); no_room (every
batch within its bound is complete); surplus (other groups were faster); retry and truncated (see `Unstick`). A member
(`MemberDropped`): surplus (other members were faster), or the reason of its `Drop`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

RefuseReason = Literal[
    "no_slot", "size_differs", "group_full", "group_closed", "group_finished", "episode_finished", "not_stuck"
]
StuckAction = Literal["retry", "truncate"]


# Events


@dataclass(frozen=True, slots=True)
class Join:
    """An episode requests to start in a group that is trained on `size` members."""

    group_id: str
    episode_id: str
    size: int
    version: int | None = None
    """The version of the engine that would sample the episode now; None: the newest."""


@dataclass(frozen=True, slots=True)
class Finish:
    """An episode has ended and its reward is being computed: it keeps its place until `Reward` or `Drop`."""

    episode_id: str


@dataclass(frozen=True, slots=True)
class Reward:
    """An episode has its final reward. Groups of equal rewards are those whose `value` is equal."""

    episode_id: str
    value: float | None = None
    trainable: bool = True
    """False if no token of the episode can be trained. Its reward counts in its group all the same."""


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
    """The trainer works on batch `next_batch`. Once the batch is complete, a `Publish` no longer skips it."""

    batch: int


@dataclass(frozen=True, slots=True)
class Returned:
    """The trainer gives batch `next_batch` back untrained. It is skipped if a version after it is published already."""

    batch: int


@dataclass(frozen=True, slots=True)
class Consume:
    """Batch `next_batch`, which is complete, was trained."""

    batch: int


@dataclass(frozen=True, slots=True)
class Publish:
    """`version`, greater than all before, is the newest."""

    version: int


@dataclass(frozen=True, slots=True)
class Unstick:
    """Batch `next_batch` has been STUCK for too long, so its last groups are given up. Other groups may start for it (`retry`),
    or it is trained without them (`truncate`)."""

    batch: int
    action: StuckAction


Event = Join | Finish | Reward | Drop | CloseGroup | Leased | Returned | Consume | Publish | Unstick


# Commands


@dataclass(frozen=True, slots=True)
class Admit:
    """The episode may start; `version` is its group's `min_version`."""

    episode_id: str
    group_id: str
    batch: int
    version: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """The event changed nothing. `episode_id` is empty if it was about no episode."""

    episode_id: str
    reason: RefuseReason


@dataclass(frozen=True, slots=True)
class Grading:
    """The episode has ended. It keeps its place until it has a reward, or will never have one."""

    episode_id: str


@dataclass(frozen=True, slots=True)
class MemberDropped:
    """The episode is dropped, whatever happens to its group."""

    episode_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Occupied:
    """The group with its rewarded members occupies entry `entry` (from 0) of `batch`. If that batch is skipped, the group is
    lost (`Skipped`), or gets a place in a later one: `Moved` or `OverBound`, and a second `Occupied`."""

    group_id: str
    batch: int
    entry: int


@dataclass(frozen=True, slots=True)
class GroupDropped:
    """The group is dropped, with all members that were not dropped yet."""

    group_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class AbortEpisode:
    """The episode is to be stopped: it was dropped just before, by `MemberDropped` or its group's `GroupDropped`."""

    episode_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Moved:
    """The group was moved to a later batch, within its bound."""

    group_id: str
    from_batch: int
    to_batch: int


@dataclass(frozen=True, slots=True)
class OverBound:
    """The group was moved to a batch beyond its bound: tokens of versions before `to_batch` - eta are to be masked."""

    group_id: str
    from_batch: int
    to_batch: int


@dataclass(frozen=True, slots=True)
class BatchReady:
    """The batch is complete: no group will be added, and it can be trained."""

    batch: int


@dataclass(frozen=True, slots=True)
class Consumed:
    """The batch was trained, with its groups in order of entry."""

    batch: int
    group_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Skipped:
    """Batches `first` to `until`, exclusive, will never be trained, nor the groups that occupied them."""

    first: int
    until: int
    group_ids: tuple[str, ...]


Command = (
    Admit | Refuse | Grading | MemberDropped | Occupied | GroupDropped | AbortEpisode | Moved | OverBound | BatchReady
    | Consumed | Skipped
)  # fmt: skip

_EVENTS: dict[str, type[Event]] = {t.__name__: t for t in get_args(Event)}


def event_to_json(event: Event) -> dict[str, Any]:
    """Return the event's fields, and its class name as `type`.

    Newer fields (`Join.version`, `Reward.trainable`) are left out at their defaults, so that older builds read the event.
    """
    fields = asdict(event)
    if isinstance(event, Join) and event.version is None:
        del fields["version"]
    if isinstance(event, Reward) and event.trainable:
        del fields["trainable"]
    return {"type": type(event).__name__, **fields}


def event_from_json(value: dict[str, Any]) -> Event:
    """Return the inverse of `event_to_json`. Raise ValueError if `value` is not an event."""
    fields = {name: tuple(x) if isinstance(x, list) else x for name, x in value.items() if name != "type"}
    kind: Any = _EVENTS.get(str(value.get("type")))
    if kind is None:
        raise ValueError(f"no event of the ledger: {value}")
    try:
        event: Event = kind(**fields)
    except TypeError as error:
        raise ValueError(f"not the fields of {kind.__name__}: {value}") from error
    return event


def command_to_json(command: Command) -> dict[str, Any]:
    """Return the command's fields, and its class name as `type`."""
    return {"type": type(command).__name__, **asdict(command)}
