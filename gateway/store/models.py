"""The tables. Token arrays are little-endian blobs: ids int32, log-probabilities float32, flags uint8."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, BigInteger, Float, ForeignKey, Index, Integer, LargeBinary, MetaData, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from gateway.store.columns import AnyText, partial_index

_NAMES = {
    "ix": "ix_%(column_0_label)s",
    "uq": "uq_%(table_name)s_%(column_0_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s",
    "pk": "pk_%(table_name)s",
}
_NOTHING = text("''")
_SERIAL = BigInteger().with_variant(Integer, "sqlite")


class Base(DeclarativeBase):
    """Names of constraints are fixed, so that migrations can drop them."""

    metadata = MetaData(naming_convention=_NAMES)


class EpisodeRow(Base):
    """One run of an agent on a task."""

    __tablename__ = "episodes"
    __table_args__ = (
        Index("ix_episodes_group", "group_id"),
        Index("ix_episodes_created", "created_at", "id"),
        Index("ix_episodes_closed", "closed_at", "id"),
        Index("ix_episodes_state", "state", "created_at", "id"),
        partial_index("ix_episodes_unfinished", "id", where="state <> 'closed'"),
        Index("ix_episodes_mode", "mode", "created_at", "id"),
        Index("ix_episodes_model", "model", "created_at", "id"),
        Index("ix_episodes_task", "task_id", "created_at", "id"),
        Index("ix_episodes_agent", "agent", "created_at", "id"),
    )

    id: Mapped[str] = mapped_column(AnyText(40), primary_key=True)
    key_hash: Mapped[str] = mapped_column(AnyText(64), unique=True)
    task_id: Mapped[str] = mapped_column(AnyText(255))
    group_id: Mapped[str] = mapped_column(AnyText(255))
    mode: Mapped[str] = mapped_column(AnyText(8))
    model: Mapped[str] = mapped_column(AnyText(255))
    details: Mapped[dict[str, Any]] = mapped_column(JSON)
    """The opener's `metadata`."""
    version: Mapped[int] = mapped_column(Integer)
    state: Mapped[str] = mapped_column(AnyText(16))
    reason: Mapped[str] = mapped_column(AnyText(), default="")
    reward: Mapped[float | None] = mapped_column(Float)
    components: Mapped[dict[str, float] | None] = mapped_column(JSON)
    created_at: Mapped[float] = mapped_column(Float)
    closed_at: Mapped[float | None] = mapped_column(Float)
    agent: Mapped[str] = mapped_column(AnyText(255), default="", server_default=_NOTHING)
    """The `[agents]` key under which it was opened by its first call; empty: through the admin API."""
    notice: Mapped[str] = mapped_column(AnyText(64), default="", server_default=_NOTHING)
    """A notice for people about how the episode was opened, such as that its conversation equals another one."""
    error: Mapped[str] = mapped_column(AnyText(), default="", server_default=_NOTHING)
    """The last output of its agent or its graders when they failed."""
    sampling: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    """The sampling parameters that stand in place of those that its calls request; None: there are none."""
    attempt: Mapped[int] = mapped_column(Integer, default=1, server_default=text("1"))
    """The number of its agent's attempt: 1 more with each restart."""


class TallyRow(Base):
    """The number of episodes of a model, mode, state and reason; kept with every change (see tallies.py)."""

    __tablename__ = "tallies"

    model: Mapped[str] = mapped_column(AnyText(255), primary_key=True)
    mode: Mapped[str] = mapped_column(AnyText(8), primary_key=True)
    state: Mapped[str] = mapped_column(AnyText(16), primary_key=True)
    reason: Mapped[str] = mapped_column(AnyText(), primary_key=True)
    count: Mapped[int] = mapped_column(BigInteger)


class NodeRow(Base):
    """A run of tokens; rows are never changed, but that an attempt that crashed is masked afterwards (`turns.forsake`).

    An episode has one tree per model that it called.
    """

    __tablename__ = "nodes"

    episode_id: Mapped[str] = mapped_column(ForeignKey("episodes.id", ondelete="CASCADE"), primary_key=True)
    model: Mapped[str] = mapped_column(AnyText(255), primary_key=True)
    index: Mapped[int] = mapped_column(Integer, primary_key=True)
    parent: Mapped[int] = mapped_column(Integer)
    at: Mapped[int] = mapped_column(Integer)
    sampled: Mapped[bool]
    ids: Mapped[bytes] = mapped_column(LargeBinary)
    logprobs: Mapped[bytes] = mapped_column(LargeBinary)
    spans: Mapped[list[list[int]]] = mapped_column(JSON)
    """[[version, number of tokens], ...]; a third number: the newest version that it may be."""
    flags: Mapped[bytes] = mapped_column(LargeBinary)
    temperature: Mapped[float] = mapped_column(Float)
    mask_reason: Mapped[str] = mapped_column(AnyText(64))
    call_id: Mapped[str] = mapped_column(AnyText(64))
    images: Mapped[list[list[Any]] | None] = mapped_column(JSON(none_as_null=True))
    """[[hash, offset, number of tokens], ...]: the images among the tokens; None: there are none."""
    kept: Mapped[bytes | None] = mapped_column(LargeBinary)
    """What truncated distributions kept (`headgate/kept.py`); None: it is not known of any token."""


class NodeRouteRow(Base):
    """The experts that a node's tokens went through (`gateway/store/routes.py`), where the model records them."""

    __tablename__ = "node_routes"

    episode_id: Mapped[str] = mapped_column(ForeignKey("episodes.id", ondelete="CASCADE"), primary_key=True)
    model: Mapped[str] = mapped_column(AnyText(255), primary_key=True)
    index: Mapped[int] = mapped_column(Integer, primary_key=True)
    """The node's."""
    layers: Mapped[int] = mapped_column(Integer)
    top_k: Mapped[int] = mapped_column(Integer)
    dtype: Mapped[str] = mapped_column(AnyText(8))
    data: Mapped[bytes] = mapped_column(LargeBinary)


class ImageRow(Base):
    """An image's file, once, however many episodes have it."""

    __tablename__ = "images"

    hash: Mapped[str] = mapped_column(AnyText(64), primary_key=True)
    """SHA-256 of the file, in hexadecimal digits."""
    media_type: Mapped[str] = mapped_column(AnyText(32))
    data: Mapped[bytes] = mapped_column(LargeBinary)


class ImageUseRow(Base):
    """An episode's use of an image: the file is kept as long as any episode has it."""

    __tablename__ = "image_uses"
    __table_args__ = (Index("ix_image_uses_hash", "hash"),)

    episode_id: Mapped[str] = mapped_column(ForeignKey("episodes.id", ondelete="CASCADE"), primary_key=True)
    hash: Mapped[str] = mapped_column(ForeignKey("images.hash"), primary_key=True)


class CallRow(Base):
    """One API request that sampled a turn, here or (node -1, see ExchangeRow) upstream."""

    __tablename__ = "calls"
    __table_args__ = (
        Index("ix_calls_request_key", "episode_id", "request_key"),
        partial_index("ix_calls_open", "open_to", "digest", where="open_to IS NOT NULL"),
        partial_index("ix_calls_faulty", "received_at", where="tool_faults IS NOT NULL"),
    )

    id: Mapped[str] = mapped_column(AnyText(64), primary_key=True)
    episode_id: Mapped[str] = mapped_column(ForeignKey("episodes.id", ondelete="CASCADE"))
    model: Mapped[str] = mapped_column(AnyText(255))
    node: Mapped[int] = mapped_column(Integer)
    request_key: Mapped[str] = mapped_column(AnyText(64))
    """The key by which a retry finds the request's response."""
    api: Mapped[str] = mapped_column(AnyText(16))
    stream: Mapped[bool]
    requested: Mapped[dict[str, Any]] = mapped_column(JSON)
    used: Mapped[dict[str, Any]] = mapped_column(JSON)
    logprobs_mode: Mapped[str] = mapped_column(AnyText(32))
    engine: Mapped[str] = mapped_column(AnyText(64))
    finish_reason: Mapped[str] = mapped_column(AnyText(16))
    prompt_tokens: Mapped[int] = mapped_column(Integer)
    completion_tokens: Mapped[int] = mapped_column(Integer)
    pauses: Mapped[int] = mapped_column(Integer)
    digest: Mapped[bytes] = mapped_column(LargeBinary)
    """The digest of the conversation with this turn's reply; a later call with the same digest continues it."""
    received_at: Mapped[float] = mapped_column(Float)
    first_token_s: Mapped[float | None] = mapped_column(Float)
    seconds: Mapped[float] = mapped_column(Float)
    reward: Mapped[float | None] = mapped_column(Float)
    """Posted on this call; it counts in the episode's."""
    tool_faults: Mapped[str | None] = mapped_column(AnyText(64))
    """The faults of the reply's tool calls, with commas (`gateway/render/tool_faults.py`); else None."""
    open_to: Mapped[str | None] = mapped_column(AnyText(255))
    """While the episode is open: the agent whose conversations may go on from this reply; else None."""
    queued_s: Mapped[float | None] = mapped_column(Float)
    """The time until an engine had the call; None: not known."""


class RefusedCallRow(Base):
    """A request for a reply that was refused before anything was sampled (see refused_calls.py)."""

    __tablename__ = "refused_calls"

    episode_id: Mapped[str] = mapped_column(ForeignKey("episodes.id", ondelete="CASCADE"), primary_key=True)
    index: Mapped[int] = mapped_column(Integer, primary_key=True)
    at: Mapped[float] = mapped_column(Float)
    """When the newest of them came, in seconds since the epoch."""
    api: Mapped[str] = mapped_column(AnyText(16))
    model: Mapped[str] = mapped_column(AnyText(255))
    """The model that was to respond; empty if the request was refused before that was known."""
    status: Mapped[int] = mapped_column(Integer)
    code: Mapped[str] = mapped_column(AnyText(64))
    message: Mapped[str] = mapped_column(AnyText())
    times: Mapped[int] = mapped_column(Integer)
    """The number of refusals that the row stands for."""


class ExchangeRow(Base):
    """A request to an upstream model and its response, in the API's own form."""

    __tablename__ = "exchanges"

    call_id: Mapped[str] = mapped_column(ForeignKey("calls.id", ondelete="CASCADE"), primary_key=True)
    request: Mapped[dict[str, Any]] = mapped_column(JSON)
    status: Mapped[int] = mapped_column(Integer)
    response: Mapped[str] = mapped_column(AnyText())
    """The body as it came; of a stream, the events."""


class RetryRow(Base):
    """The call that serves a request whose retry was started again, while earlier calls may still run elsewhere."""

    __tablename__ = "retries"

    episode_id: Mapped[str] = mapped_column(ForeignKey("episodes.id", ondelete="CASCADE"), primary_key=True)
    name: Mapped[str] = mapped_column(AnyText(32), primary_key=True)
    """The part of the request's key that its retries share."""
    call_id: Mapped[str] = mapped_column(AnyText(64))
    at: Mapped[float] = mapped_column(Float)
    """Seconds since the epoch by the database's clock."""


class ResponseRow(Base):
    """A response that its client may come back for (`store`), in the API's own form."""

    __tablename__ = "answers"
    __table_args__ = (
        Index("ix_answers_episode", "episode_id", "created_at"),
        partial_index("ix_answers_previous", "previous", where="previous <> ''"),
    )

    id: Mapped[str] = mapped_column(AnyText(64), primary_key=True)
    episode_id: Mapped[str] = mapped_column(ForeignKey("episodes.id", ondelete="CASCADE"))
    model: Mapped[str] = mapped_column(AnyText(255))
    previous: Mapped[str] = mapped_column(AnyText(64))
    """The response that this one continues; empty: none."""
    messages: Mapped[list[dict[str, Any]]] = mapped_column(JSON)
    """The messages that it adds to the conversation before it, in the form of chat completions, its own message last."""
    input: Mapped[list[dict[str, Any]]] = mapped_column(JSON)
    """The client's input, unchanged."""
    answer: Mapped[dict[str, Any]] = mapped_column(JSON)
    """The response; the table has its name, and this column too, from before `response` was the word."""
    created_at: Mapped[float] = mapped_column(Float)
    deleted_at: Mapped[float | None] = mapped_column(Float)
    """The time of deletion. A deleted response is not shown; responses that continue it still can be."""


class LedgerEventRow(Base):
    """An event of the staleness ledger, in order; replaying the events gives the ledger."""

    __tablename__ = "ledger_events"
    __table_args__ = (Index("ix_ledger_events_model", "model", "seq"),)

    seq: Mapped[int] = mapped_column(_SERIAL, primary_key=True, autoincrement=True)
    model: Mapped[str] = mapped_column(AnyText(255))
    at: Mapped[float] = mapped_column(Float)
    event: Mapped[dict[str, Any]] = mapped_column(JSON)
    commands: Mapped[list[dict[str, Any]]] = mapped_column(JSON)


class DecisionRow(Base):
    """A decision of the ledger or the feed about an episode or a group, with its reason."""

    __tablename__ = "decisions"
    __table_args__ = (
        Index("ix_decisions_group", "group_id", "episode_id"),
        Index("ix_decisions_episode", "episode_id"),
        partial_index("ix_decisions_trained", "model", "batch", "entry", where="kind = 'trained'"),
        partial_index("ix_decisions_alone", "at", where="kind IN ('refused', 'deleted')"),
    )

    seq: Mapped[int] = mapped_column(_SERIAL, primary_key=True, autoincrement=True)
    model: Mapped[str] = mapped_column(AnyText(255))
    at: Mapped[float] = mapped_column(Float)
    group_id: Mapped[str] = mapped_column(AnyText(255))
    episode_id: Mapped[str] = mapped_column(AnyText(40))
    """Empty: it is about the whole group."""
    kind: Mapped[str] = mapped_column(AnyText(16))
    """admitted, refused, finished, rewarded, dropped, aborted, moved, occupied, trained, skipped, masked, deleted"""
    reason: Mapped[str] = mapped_column(AnyText(255))
    batch: Mapped[int | None] = mapped_column(Integer)
    entry: Mapped[int | None] = mapped_column(Integer)
    """The group's place in its batch."""
    details: Mapped[dict[str, Any]] = mapped_column(JSON)


class EventRow(Base):
    """An event of the stream that people and tools watch (see events.py); ids grow in the order of commits, and none is used
    twice."""

    __tablename__ = "events"
    __table_args__ = (
        partial_index("ix_events_machines", "kind", "id", where="episode_id = '' AND group_id = ''"),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(_SERIAL, primary_key=True, autoincrement=True)
    at: Mapped[float] = mapped_column(Float)
    """Seconds since the epoch by the database's clock."""
    kind: Mapped[str] = mapped_column(AnyText(64))
    model: Mapped[str] = mapped_column(AnyText(255))
    episode_id: Mapped[str] = mapped_column(AnyText(40))
    """Empty: it is not about an episode."""
    group_id: Mapped[str] = mapped_column(AnyText(255))
    """Empty: it is not about a group."""
    data: Mapped[dict[str, Any]] = mapped_column(JSON)


class TrainerStepRow(Base):
    """A step of a trainer, with the figures that it posted (see trainer_steps.py)."""

    __tablename__ = "trainer_steps"

    model: Mapped[str] = mapped_column(AnyText(255), primary_key=True)
    run: Mapped[str] = mapped_column(AnyText(255), primary_key=True)
    """The trainer's name for its run."""
    step: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    version: Mapped[int | None] = mapped_column(BigInteger)
    """The version that the step made."""
    at: Mapped[float] = mapped_column(Float)
    """Seconds since the epoch by the database's clock, when the step was posted first."""
    figures: Mapped[dict[str, Any]] = mapped_column(JSON)
    folder: Mapped[str] = mapped_column(AnyText())
    """The folder of the run, which may have the step's figures by token; empty: not known."""


class LeaseRow(Base):
    """The right to train on one batch. The newest fence of a batch is the valid one."""

    __tablename__ = "leases"

    model: Mapped[str] = mapped_column(AnyText(255), primary_key=True)
    fence: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    id: Mapped[str] = mapped_column(AnyText(40), unique=True)
    batch: Mapped[int] = mapped_column(Integer)
    consumer: Mapped[str] = mapped_column(AnyText(255))
    state: Mapped[str] = mapped_column(AnyText(16))
    checkpoint: Mapped[str] = mapped_column(AnyText(), default="")
    reason: Mapped[str] = mapped_column(AnyText(), default="")
    created_at: Mapped[float] = mapped_column(Float)
    deadline: Mapped[float] = mapped_column(Float)
    """Seconds since the epoch by the database's clock: it ends then unless it is renewed."""


class VersionRow(Base):
    """A published version. A number is used once, ever; `parent` is the version that it was trained from."""

    __tablename__ = "versions"

    model: Mapped[str] = mapped_column(AnyText(255), primary_key=True)
    version: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    parent: Mapped[int | None] = mapped_column(Integer)
    path: Mapped[str] = mapped_column(AnyText())
    state: Mapped[str] = mapped_column(AnyText(16))
    report: Mapped[list[dict[str, Any]]] = mapped_column(JSON)
    created_at: Mapped[float] = mapped_column(Float)
    bad: Mapped[str] = mapped_column(AnyText(), default="", server_default=_NOTHING)
    """The reason why no engine may run the version; empty if it is not known to be bad."""


class CanaryRow(Base):
    """The trial of a version on a share of the new conversations; the newest one of a model may still run."""

    __tablename__ = "canaries"

    model: Mapped[str] = mapped_column(AnyText(255), primary_key=True)
    version: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    live: Mapped[int] = mapped_column(Integer)
    """The version that all other conversations have."""
    share: Mapped[float] = mapped_column(Float)
    conversations: Mapped[int] = mapped_column(Integer)
    """The number of rewarded conversations after which the version is promoted."""
    low: Mapped[float] = mapped_column(Float)
    high: Mapped[float] = mapped_column(Float)
    """The range to which rewards are clipped."""
    began_at: Mapped[float] = mapped_column(Float)
    """Seconds since the epoch: conversations that were opened since take part."""
    held: Mapped[bool]
    """A person decides, whatever the test finds."""
    outcome: Mapped[str] = mapped_column(AnyText(16), default="", server_default=_NOTHING)
    """promoted or returned; empty: it runs."""
    why: Mapped[str] = mapped_column(AnyText(), default="", server_default=_NOTHING)
    ended_at: Mapped[float | None] = mapped_column(Float)
    figures: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    """Of both arms at the end."""


class CoordinatorRow(Base):
    """One row: which gateway process decides. Its fence grows with every new holder, and is never used twice."""

    __tablename__ = "coordinator"

    name: Mapped[str] = mapped_column(AnyText(16), primary_key=True)
    fence: Mapped[int] = mapped_column(BigInteger)
    holder: Mapped[str] = mapped_column(AnyText(64))
    url: Mapped[str] = mapped_column(AnyText())
    """The URL at which other gateway processes reach it."""
    deadline: Mapped[float] = mapped_column(Float)
    """Seconds since the epoch by the database's clock: afterwards another process may become the coordinator."""


class DeletionRow(Base):
    """A deletion of one caller's or one user's conversations (see erasure.py)."""

    __tablename__ = "deletions"

    id: Mapped[str] = mapped_column(AnyText(40), primary_key=True)
    at: Mapped[float] = mapped_column(Float)
    """Episodes that were opened later are not deleted."""
    done_at: Mapped[float | None] = mapped_column(Float)
    agent: Mapped[str] = mapped_column(AnyText(255))
    users: Mapped[list[str]] = mapped_column(JSON)
    """The user's id in its stored forms, until the deletion is done."""
    episodes: Mapped[list[str]] = mapped_column(JSON)
    """The ids of the episodes that were erased."""


class CompatibilityRow(Base):
    """One row: the oldest build that works on these tables, named by the newest revision that it knows."""

    __tablename__ = "compatibility"

    oldest: Mapped[str] = mapped_column(AnyText(16), primary_key=True)


class WriterRow(Base):
    """The last commit of a gateway process, so that it can find out after a lost connection (see gateway/store/commits.py)."""

    __tablename__ = "writers"

    id: Mapped[str] = mapped_column(AnyText(40), primary_key=True)
    number: Mapped[int] = mapped_column(BigInteger)
    """The number of its newest committed transaction."""
    at: Mapped[float] = mapped_column(Float)
    """Seconds since the epoch by the database's clock."""
