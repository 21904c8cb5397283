"""The control program and what it decides by: `[control]`, `[routing]`, `[nodes]`, `[lending]`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from gateway.config.base import Name
from headgate.configuration import Seconds, Section
from scheduler.policies.placement import Choice, Rule
from scheduler.policies.throughput import EngineModel

_ENGINE = EngineModel()


class ControlSettings(Section):
    """`[control]`: the control program, which decides when engines are launched, updated and restarted."""

    recording: Path | None = Path("runs/control.jsonl")
    """The file that records events and decisions, for `scheduler replay`."""


class EnginePrior(Section):
    """`[routing.engine_prior]`: the assumed duration of an engine's step, until it has been measured: s_per_kv_token * cached
    tokens + max(s_per_batch, s_per_call * running calls) + s_per_step."""

    s_per_kv_token: float = Field(_ENGINE.s_per_kv_token, ge=0, le=1)
    """Seconds for each token in the cache."""
    s_per_batch: float = Field(_ENGINE.s_per_batch, ge=0, le=100)
    """Seconds for a batch, at least."""
    s_per_call: float = Field(_ENGINE.s_per_call, ge=0, le=100)
    """Seconds for each running call."""
    s_per_step: float = Field(_ENGINE.s_per_step, gt=0, le=100)
    """Seconds for every step."""


class RoutingSettings(Section):
    """`[routing]`: where calls go, when engines pull weights, which calls move (docs/topics/scheduler.md, Where a call goes)."""

    rule: Rule = Choice().rule
    """`cached`: a call goes to the engine that has its prefix cached, if that outweighs the load there.
    `gain`: it goes to the engine where it adds most tokens a second."""
    group_version: Literal["newest", "engine"] = "newest"
    """The `min_version` of a group that starts, from which its staleness is counted: the `newest` version, or that of the
    `engine` that would sample it, so that engines which lag get new groups (with `[update] order = "pull"`)."""
    migrate: bool | None = None
    """Calls move out of engines with long queues, and from fast engines to slow ones. If it is not given: with `[update] order =
    "pull"`, where stragglers would otherwise keep an engine from ever pulling."""
    engine_prior: EnginePrior = EnginePrior()
    distance_s: Seconds = 0.05
    """Seconds that a call takes longer in an engine of another zone than `[cluster] zone`. With `gain`, it goes there if it still
    gains more."""


class NodeSettings(Section):
    """`[nodes.NAME]`: a machine, or a part of one, and what it is for (docs/topics/scheduler.md)."""

    tags: tuple[Name, ...] = Field(min_length=1, max_length=64)
    """`rollout`: its engines sample; `train`: a trainer works on it; both: its engines sample while the trainer waits. Any other
    tag is a description."""
    zone: str = Field("", max_length=64)
    """The network zone of the node. Over HTTP each zone fetches a version once, and its mirrors then from one another; nodes
    without a zone are in that of the weights' source."""
    engines: int = Field(0, ge=0, le=256)
    """The number of engines to start there, configured by `[engine]`; they are called NAME-0, NAME-1, ..."""
    urls: tuple[str, ...] = ()
    """The URLs of engines that run already, instead of `engines`."""
    mirrors: tuple[str, ...] = ()
    """The mirror (`gateway mirror`) of each of `urls`, as `[engine] mirrors` for the engines of `[engine] urls`."""
    model: str | None = None
    """Which model its engines run; the first trained one, if none is named."""

    @model_validator(mode="after")
    def _engines_can_be(self) -> Self:
        if self.engines and self.urls:
            raise ValueError("set `engines` (started here) or `urls` (already running), not both")
        if self.mirrors and len(self.mirrors) != len(self.urls):
            raise ValueError(
                f"`mirrors` has {len(self.mirrors)} for {len(self.urls)} `urls`: one for each is needed"
            )
        if (self.engines or self.urls) and "rollout" not in self.tags:
            raise ValueError("engines need the tag 'rollout': without it they would never wake")
        return self

    @property
    def places(self) -> tuple[str | None, ...]:
        """The URL of each engine; None for one that is to be started."""
        return self.urls or (None,) * self.engines


class LendingSettings(Section):
    """`[lending]`: nodes tagged `rollout` and `train`, which sample while their trainer waits (docs/topics/scheduler.md)."""

    enabled: bool = True
    """False: the engines of these nodes never wake."""
    margin_s: float = Field(1.0, ge=0, le=3600)
    """The margin by which the predicted wait must exceed the measured cost of the switch before a node is lent, and by which a
    lent node is recalled early."""
    min_stay_s: float = Field(5.0, ge=0, le=3600)
    """The shortest time for which a node is lent, unless its trainer claims it, and between a recall and the next loan."""
    deadline_s: float | None = Field(None, ge=0.2, le=3600)
    """The longest that a trainer waits for its node. An engine that is not asleep after half of that time is killed. By default
    30, and 2 for each GB of the largest model's weights, which `[engine] sleep = "level1"` copies to the host's memory."""
    claim_s: float = Field(30.0, ge=0.5, le=3600)
    """Seconds without a renewal after which a claimed node may be lent; also how long a node is not lent after the
    gateway's start, unless its trainer renews its claim."""
    recall_ahead_share: float = Field(1.0, ge=0, le=1)
    """The time before its batch is complete at which a trainer gets its node back, as a share of the measured time that it
    computes on a batch. 0 for a trainer that reads no group before the batch is complete."""
