"""The rows of the store that other packages read and write, as types. At run time they are plain dictionaries."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from headgate.types import EpisodeMode


class UsedSampling(TypedDict, total=False):
    """The sampling parameters in use, and how the prompt was written; empty for a call to an upstream model."""

    temperature: float
    top_p: float
    max_tokens: int
    seed: int | None
    min_tokens: int
    bridged: bool
    switches: dict[str, Any]
    redacted: int
    """Tokens of the reply that are not stored (`[redaction]`)."""


class CallRecord(TypedDict):
    """A recorded call; `node` is the last of its turn, -1 for a call to an upstream model."""

    id: str
    episode_id: str
    model: str
    node: int
    request_key: str
    api: str
    stream: bool
    requested: dict[str, Any]
    used: UsedSampling
    logprobs_mode: str
    engine: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    pauses: int
    digest: bytes
    received_at: float
    first_token_s: float | None
    seconds: float
    reward: NotRequired[float | None]
    tool_faults: str | None
    open_to: NotRequired[str | None]
    queued_s: float | None


class NewEpisode(TypedDict):
    """An episode that is being opened; `version` is known once its group has a place."""

    id: str
    key_hash: str
    task_id: str
    group_id: str
    mode: EpisodeMode
    model: str
    version: NotRequired[int]
    details: dict[str, Any]
    state: Literal["open"]
    reason: str
    created_at: float
    agent: str
    notice: str
    sampling: dict[str, Any] | None


class EpisodeRecord(TypedDict):
    """A stored episode, without the hash of its key; see `EpisodeRow`."""

    id: str
    task_id: str
    group_id: str
    mode: EpisodeMode
    model: str
    details: dict[str, Any]
    version: int
    state: Literal["open", "grading", "closed"]
    reason: str
    reward: float | None
    components: dict[str, float] | None
    created_at: float
    closed_at: float | None
    agent: str
    notice: str
    error: str
    sampling: dict[str, Any] | None
    attempt: int


class UnfinishedEpisode(EpisodeRecord):
    """An episode that is not closed, with the number of its calls."""

    key_hash: str
    calls: int


class EpisodeOutcome(TypedDict):
    """The state of an episode, and once it is closed its reason and reward."""

    state: Literal["open", "grading", "closed"]
    reason: str
    reward: float | None
    components: dict[str, float] | None
    error: str


class RefusedCallRecord(TypedDict):
    """Refused calls of one kind in a row; see `RefusedCallRow`."""

    at: float
    api: str
    model: str
    status: int
    code: str
    message: str
    times: int


class DecisionRecord(TypedDict):
    """A stored decision about an episode or a group; see `DecisionRow`."""

    seq: int
    model: str
    at: float
    group_id: str
    episode_id: str
    kind: str
    reason: str
    batch: int | None
    entry: int | None
    details: dict[str, Any]


class TrainedGroup(TypedDict):
    """The decision that a batch was trained on a group; `details` names its version and episodes."""

    group_id: str
    batch: int
    details: dict[str, Any]


class VersionRecord(TypedDict):
    """A published version of a model's weights; `bad` is why no engine may run it."""

    model: str
    version: int
    parent: int | None
    path: str
    state: Literal["updating", "live", "failed"]
    report: list[dict[str, Any]]
    created_at: float
    bad: str


class CanaryRecord(TypedDict):
    """The trial of a version; see `CanaryRow`."""

    model: str
    version: int
    live: int
    share: float
    conversations: int
    low: float
    high: float
    began_at: float
    held: bool
    outcome: Literal["", "promoted", "returned"]
    why: str
    ended_at: float | None
    figures: dict[str, Any] | None


class LeaseRecord(TypedDict):
    """A trainer's lease of a batch; `left_s` is negative once it has expired."""

    model: str
    fence: int
    id: str
    batch: int
    consumer: str
    state: str
    checkpoint: str
    reason: str
    created_at: float
    deadline: float
    left_s: NotRequired[float]
