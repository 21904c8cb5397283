"""The tables for keys and their limits: `[admin]`, `[projects]`, `[agents]`, `[limits]`, `[queue]`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, SecretStr, model_validator

from gateway.config.base import Days
from headgate.configuration import Seconds, Section


class AdminSettings(Section):
    """`[admin]`: who may open episodes and publish weights."""

    key: SecretStr | None = Field(None, min_length=1)
    """Without a key the gateway listens on loopback addresses alone, and refuses web pages of other sites and foreign names in
    `Host` (docs/topics/security.md)."""
    port: int | None = Field(None, ge=1, le=65_535)
    """A separate port for the admin API and `/metrics`, which then are not on the main one."""
    host: str | None = None
    """The address at which that port listens; `[server] host` by default."""

    @model_validator(mode="after")
    def _host_has_port(self) -> Self:
        if self.host is not None and self.port is None:
            raise ValueError(
                "`host` needs `port`: without a port of its own, the admin API is served at [server] host"
            )
        return self


class ProjectSettings(Section):
    """`[projects.NAME]`: a tenant: a set of models, and an admin key that reaches nothing else (docs/topics/security.md)."""

    key: SecretStr = Field(min_length=16)
    """Or `HEADGATE_PROJECT_KEY_NAME` in the environment: the name in capitals, `_` for `-`."""
    models: tuple[str, ...] = Field(min_length=1)
    """A trained model is in one project at most."""
    weights: Path | None = None
    """The folder in which the versions are that this key may publish; without one it may publish none."""


class AgentSettings(Section):
    """`[agents.NAME]`: an agent's own key, under which calls open their episodes (docs/topics/callers.md)."""

    key: SecretStr = Field(min_length=16)
    """Or `HEADGATE_AGENT_KEY_NAME` in the environment (capitals, `_` for `-`). Without attempts (docs/topics/callers.md)."""
    model: str | None = None
    """The trained model that its episodes are about; the first, if none is named."""
    mode: Literal["eval", "train"] = "eval"
    """The mode of the episodes that its calls open."""
    group_size: int | None = Field(None, ge=1, le=1024)
    """The number of episodes with the same opening messages that make a group. Needed with `train`, and only there."""
    idle_s: Seconds | None = None
    """Seconds of silence after which a conversation is over; `[episodes] idle_s` by default."""
    max_episodes: int = Field(1024, ge=1, le=1_000_000)
    """Concurrently open episodes that its calls opened; further ones are refused with 429."""
    max_wait_s: float = Field(5.0, ge=0, le=86_400)
    """How long a call of `train` waits for a slot within the staleness bound, before it is refused with 429."""
    live: bool = False
    """True: people use the agent all day. A conversation without a slot is not refused, and one that is too old for its batch
    is not stopped: both go on as evaluation."""
    share: float = Field(1.0, gt=0, le=1)
    """The share of conversations that may be trained, drawn at random; the others are evaluation."""
    consent: Literal["assumed", "required"] = "assumed"
    """`required`: only conversations are trained whose first call agrees (`X-Headgate-Train: yes`). A call that disagrees
    (`no`) always makes its conversation evaluation."""

    feedback_s: float | None = Field(None, gt=0, le=30 * 86_400)
    """Seconds after the end of a conversation without a reward in which feedback is accepted (`POST /v1/feedback`). It holds no
    place: it is trained if a batch has one when the feedback comes, or before its tokens are too old."""

    keep_days: Days | None = None
    """Days after the end of a conversation after which its contents are erased: texts, tokens and parameters. Its numbers stay
    until `[retention]` deletes them. By default contents stay as long."""

    @model_validator(mode="after")
    def _groups_are_trained(self) -> Self:
        if (self.mode == "train") != (self.group_size is not None):
            raise ValueError("`group_size` is for mode = 'train', and needed there")
        if self.mode != "train" and (self.live or self.share < 1 or self.consent == "required"):
            raise ValueError("`live`, `share` and `consent` are for mode = 'train'")
        if self.feedback_s is not None and not (self.live and self.group_size == 1):
            raise ValueError("`feedback_s` is for agents with `live = true` and `group_size = 1`")
        return self


class LimitSettings(Section):
    """`[limits.episode]`, `[limits.agent]`: concurrent use by one key; a missing key means no limit."""

    calls: int | None = Field(None, ge=1, le=1_000_000)
    """Calls that are being served."""
    tokens_per_minute: int | None = Field(None, ge=1, le=10**12)
    """Tokens of prompts and replies together. A key that has used up its minute is refused until some are left again."""


class ProjectLimitSettings(LimitSettings):
    """`[limits.project]`: what all keys of a project may have together."""

    episodes: int | None = Field(None, ge=1, le=10_000_000)
    """Open episodes, however they were opened."""
    engines: int = Field(8, ge=0, le=256)
    """Engines of one model: the project's key may add engines up to this number."""


class LimitsSettings(Section):
    """`[limits]`: beyond them calls are refused with 429 before anything is rendered. Each gateway process counts for itself."""

    episode: LimitSettings = LimitSettings()
    agent: LimitSettings = LimitSettings()
    project: ProjectLimitSettings = ProjectLimitSettings()


class QueueSettings(Section):
    """`[queue]`: calls that wait while an engine is held."""

    max_waiting: int = Field(4096, ge=1)
    """Calls of one model that may wait for an engine; further ones are refused with 503."""
    max_wait_s: Seconds = 300.0
    """Seconds that a call may wait before it is refused with 503."""
