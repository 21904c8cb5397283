"""What the routes of the feed return, and which clients they serve (docs/topics/feed.md).

Invariant: fields are added and never removed or changed unless `FEED_VERSION` grows (tests/unit/gateway/api/test_feed_schema.py).
"""

from __future__ import annotations

import re
from typing import Any, Literal

from fastapi import Request, Response
from pydantic import BaseModel, ConfigDict

from headgate.errors import BadRequest
from headgate.feed_version import FEED_HEADER, FEED_VERSION, OLDEST_FEED

_NUMBER = re.compile(r"[0-9]{1,4}")
CURSOR, COMPLETE = "x-headgate-cursor", "x-headgate-complete"
FEED_HEADERS = {FEED_HEADER: str(FEED_VERSION)}
ARROW: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "An Arrow stream of `headgate.arrow.FEED_SCHEMA`",
        "content": {
            "application/vnd.apache.arrow.stream": {"schema": {"type": "string", "format": "binary"}}
        },
        "headers": {
            CURSOR: {"schema": {"type": "integer"}, "description": "The cursor of the next request"},
            COMPLETE: {
                "schema": {"type": "string", "enum": ["true", "false"]},
                "description": "Whether the batch gets no further group",
            },
        },
    }
}


async def serve_feed(request: Request, response: Response) -> None:
    """State the version of the feed. Raise BadRequest if the client reads only versions that are too old."""
    read = request.headers.get(FEED_HEADER)
    if read is not None and not (_NUMBER.fullmatch(read) and int(read) >= OLDEST_FEED):
        message = (
            f"{FEED_HEADER}: this gateway serves versions {OLDEST_FEED} to {FEED_VERSION} of the feed, and the client reads"
            f" {read[:20]!r}: install a newer headgate where the trainer runs"
        )
        raise BadRequest(message, code="feed_version", param=FEED_HEADER)
    response.headers.update(FEED_HEADERS)


class FeedResponse(BaseModel):
    """An object of a response."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class LeaseName(FeedResponse):
    """The lease that was renewed or ended."""

    lease_id: str


class TrainedBatch(FeedResponse):
    """A batch that was acknowledged."""

    batch: int
    groups: int
    trained_at: float
    """Seconds since the epoch."""


class TrainedBatches(FeedResponse):
    """The trained batches of a model, in order."""

    model: str
    batches: list[TrainedBatch]


class Proof(FeedResponse):
    """The comparison of an engine's memory with the version."""

    verdict: Literal["proven", "partial", "failed", "none"]
    tensors: int = 0
    compared: int = 0
    why: str = ""


class ProbeFigures(FeedResponse):
    """The comparison of an engine's log-probabilities with the trainer's: means over the probe's tokens, in nats."""

    verdict: str
    """`passed`, `failed` or `indistinct`."""
    gap: float | None = None
    """Between the engine and the version."""
    parent_gap: float | None = None
    """Between the engine and the parent."""
    distance: float | None = None
    """Between the version and its parent."""
    noise: float | None = None
    margin: float | None = None


class EngineReport(FeedResponse):
    """The update of one engine to the version."""

    engine: str
    version: int
    streams: int = 0
    """Calls that were open and continued."""
    pinned: int = 0
    """Those of them that stayed in the engine."""
    seconds: dict[str, float] = {}
    """Of each step."""
    proof: Proof | None = None
    probe: ProbeFigures | None = None
    failure: str = ""


class VersionState(FeedResponse):
    """A published version."""

    model: str
    version: int
    parent: int | None
    path: str
    state: Literal["updating", "live", "failed"]
    bad: bool
    """True if no engine may run it: it is never tried again."""
    why: str
    """The reason why it is not live; empty for others."""
    on_trial: bool = False
    """True while a share of the conversations tries it, which takes as long as they do."""
    report: list[EngineReport]
    created_at: float
    """Seconds since the epoch."""
