"""Listening, storage, sharing and traces: `[server]`, `[store]`, `[retention]`, `[cluster]`, `[bus]`, `[telemetry]`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pydantic import Field, SecretStr, field_validator

from gateway.config.base import Days, Name
from headgate.configuration import Seconds, Section
from headgate.processes.ports import url_of


class ServerSettings(Section):
    """`[server]`: where the gateway listens."""

    host: str = "127.0.0.1"
    """The address to listen on. `localhost` is both loopback addresses: `127.0.0.1`, and `[::1]` where there is IPv6. Other
    addresses than loopback need `[admin] key`."""
    port: int = Field(8000, ge=0, le=65_535)
    """The port to listen on; 0: a free one."""
    public_url: str | None = None
    """The root by which agents reach the gateway, if not `http://host:port`. Without an admin key, the gateway responds to its
    host and to loopback names alone."""
    body_limit_bytes: int = Field(8 * 2**20, ge=1024, le=2**30)
    """Bytes of a request's body; more is refused with 400."""
    keep_alive_s: Seconds = 15.0
    """Seconds after which an idle stream sends an SSE comment."""
    shutdown_s: Seconds = 10.0
    """Seconds that running calls may go on after a signal to stop."""
    hosted_tools: Literal["drop", "refuse"] = "drop"
    """The treatment of tools that OpenAI would run (`web_search`, ...) in `/v1/responses`: `drop`: the model does not see them,
    and a header and a counter report that; `refuse`: the request is refused."""
    tool_grammars: Literal["refuse", "describe"] = "refuse"
    """The treatment of a custom tool with a grammar (Codex's `apply_patch`) in `/v1/responses`: `refuse`: the request is refused;
    `describe`: the tool's description shows the grammar to the model, which is not held to it."""

    @property
    def url(self) -> str:
        """The root URL that agents are given."""
        return self.public_url or url_of(self.host, self.port)


DATABASES = {"sqlite": "sqlite", "postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg"}
"""The databases that a URL can name, and the driver of each."""
DATABASE_FORMS = "use sqlite:///FOLDER/FILE.db (sqlite:////... for an absolute path) or postgresql://USER:PASSWORD@HOST/DATABASE"


class StoreSettings(Section):
    """`[store]`: the database of committed facts."""

    url: str = Field("sqlite:///runs/headgate.db", repr=False)
    """The database's URL, which may hold a password."""
    max_pending: int = Field(10_000, ge=1)
    """Writes that may wait for the database before calls are refused with 503."""
    read_wait_s: Seconds = 10.0
    """Seconds that a read, a start and a stop of the gateway wait for a lost database. A read is then refused with 503."""

    @field_validator("url")
    @classmethod
    def _known_database(cls, url: str) -> str:
        scheme, separator, _ = url.partition(":")
        kind = scheme.partition("+")[0]
        if not separator:
            raise ValueError(f"it is not a URL: {DATABASE_FORMS}")
        if kind not in DATABASES:
            raise ValueError(f"{kind}:// is not supported: {DATABASE_FORMS}")
        return url


class RetentionSettings(Section):
    """`[retention]`: how long closed episodes are kept (docs/topics/store.md). Without days, forever."""

    keep_days: Days | None = None
    """Days since its end after which an episode is deleted, unless it may still be needed."""
    keep_untrained_days: Days | None = None
    """The same for training episodes that no batch was trained on, if not `keep_days`."""
    keep_eval_days: Days | None = None
    """The same for evaluation episodes, if not `keep_days`."""


@dataclass(frozen=True, slots=True)
class ClusterMember:
    """The address of a process of a cluster, and the cluster's key."""

    url: str
    key: str = field(repr=False)


class ClusterSettings(Section):
    """`[cluster]`: several gateway processes on one store, of which one at a time decides (docs/topics/cluster.md)."""

    url: str | None = Field(None, pattern="^https?://")
    """Where the other gateway processes reach this one, without a path. Setting it (or `gateway serve --workers`) turns the
    cluster on; it needs PostgreSQL."""
    key: SecretStr | None = Field(None, min_length=16)
    """The key that the processes show one another. Or `HEADGATE_CLUSTER_KEY` in the environment."""
    lease_s: float = Field(5.0, ge=0.5, le=300)
    """Seconds without a renewal after which another process becomes the coordinator."""
    peer_timeout_s: Seconds = 10.0
    """Seconds that a process may take to carry out the coordinator's request before it counts as dead."""
    zone: str = Field("", max_length=64)
    """The network zone of this process and its agents, as `[nodes.NAME] zone` of engines: its calls prefer the zone's engines."""

    @property
    def member(self) -> ClusterMember | None:
        """This process's place in its cluster; None: it is alone."""
        return ClusterMember(self.url, self.key.get_secret_value()) if self.url and self.key else None


class BusSettings(Section):
    """`[bus]`: recent state that gateway processes share and may lose."""

    url: str = Field("memory://", pattern="^(memory|redis|rediss|unix)://", repr=False)
    """`redis://HOST:PORT/N`; `memory://` is for one process: the retry of a call whose process died then restarts it."""
    prefix: str = Field("headgate", pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    """The prefix of all keys' names: gateways that share a server but no store need different ones."""
    timeout_s: float = Field(0.5, ge=0.01, le=10)
    """How long an operation may take before the bus counts as unavailable."""
    heartbeat_ttl_s: float = Field(3.0, ge=0.5, le=60)
    """Seconds without a heartbeat after which a process counts as dead; then others take over its running calls."""
    log_s: float = Field(60.0, ge=1, le=3600)
    """Seconds that the logged calls of a dead process are kept for their retries."""


class TelemetrySettings(Section):
    """`[telemetry]`: spans of calls, sent to an OpenTelemetry collector (docs/topics/telemetry.md). Off without an endpoint."""

    endpoint: str | None = Field(None, pattern="^https?://")
    """The collector's OTLP/HTTP root, such as `http://127.0.0.1:4318`; spans are posted to `/v1/traces` below it. Needs
    `headgate[otel]`. Headers, keys too, come from `OTEL_EXPORTER_OTLP_HEADERS` in the environment."""
    service: Name = "headgate"
    """The name of this service in traces (`service.name`)."""
    share: float = Field(1.0, ge=0, le=1)
    """The share of traced calls among those without `traceparent`; with one the caller decides."""
