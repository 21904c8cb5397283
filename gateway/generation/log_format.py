"""Encodes a running call as a log, so that another process can continue it. Pure.

The head is written once: the request, its sampling and its prompt. With the experts that tokens went through, which an engine
reports at the end of a run, the whole log is written again. The body has 8 bytes for each token, its id and its log-probability,
little-endian. The state has everything else about these tokens, above all the versions that may have sampled them.

A call whose sampler has a state cannot be continued: its log only names the process that runs it, for retries.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import orjson

from gateway.bus.base import Log
from gateway.trajectories.recorder import TurnDetails
from gateway.trajectories.turn import Span, Turn
from gateway.trajectories.turn_routes import TurnRoutes
from headgate.types import FinishReason, ImageSpan, Int32Array, Sampling

_FORMAT, _WITH_IMAGES, _WITH_ROUTES = 1, 2, 3
"""An older build would continue a call without its images or experts, so their logs have other formats."""
_TOKEN = np.dtype([("id", "<i4"), ("logprob", "<f4")])
TOKEN_BYTES = _TOKEN.itemsize
_PACK = struct.Struct("<if").pack
_LENGTH_BYTES = 4
_DETAILS = [
    field.name
    for field in fields(TurnDetails)
    if field.name not in ("arrived", "queued_s", "seconds", "tool_faults")
]
"""The logged fields of a call's details: all except for those that are meaningful only within one process, or set at the end."""


@dataclass(frozen=True, slots=True)
class LoggedCall:
    """The content of a call's log."""

    log: Log
    request_key: str
    prompt: Int32Array
    """Shape (prompt tokens,)."""
    details: TurnDetails | None
    """None: the call cannot be continued."""
    turn: Turn
    refused: bool = False
    """True for the log of a refused request whose retry is expected. It has no call."""
    age_s: float = 0.0
    """Seconds since a refused request arrived."""
    images: tuple[ImageSpan, ...] = ()
    """The images among the prompt's tokens."""


def head_of(
    prompt: Int32Array,
    details: TurnDetails,
    images: Sequence[ImageSpan] = (),
    routes: TurnRoutes | None = None,
) -> bytes:
    """Return the part of a call's log that changes at most with its runs: `routes` are of those that ended."""
    values: dict[str, Any] = {"format": _FORMAT, "request_key": details.request_key, "details": None}
    if images:
        values |= {"format": _WITH_IMAGES, "images": [list(image) for image in images]}
    ids = b""
    if not details.used.pinned:
        values["details"] = {name: getattr(details, name) for name in _DETAILS}
        ids = prompt.astype("<i4").tobytes()
        if routes is not None:
            saved, rows = routes.saved()
            values |= {"format": _WITH_ROUTES, "prompt": len(prompt), "routes": saved}
            ids += rows
    text = orjson.dumps(values, option=orjson.OPT_NON_STR_KEYS)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text + ids


def head_of_refused(request_key: str, age_s: float) -> bytes:
    """Return the head of a refused request's log. Older builds read it as a call that cannot be continued.

    `age_s`: seconds since the request arrived.
    """
    values = {"format": _FORMAT, "request_key": request_key, "details": None, "refused": True, "age_s": age_s}
    text = orjson.dumps(values)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def state_of(turn: Turn, details: TurnDetails) -> bytes:
    """Return the part of a call's log that changes with every token."""
    spans = [(span.version, span.count, span.newest) for span in turn.spans]
    values = (len(turn.ids), spans, turn.engine, turn.pauses, turn.disputed, details.first_token_s)
    return orjson.dumps(values)


def body_of(turn: Turn, start: int) -> bytes:
    """Return the tokens from index `start` on."""
    pairs = zip(turn.ids[start:], turn.logprobs[start:], strict=True)
    return b"".join([_PACK(token, logprob) for token, logprob in pairs])


def read(log: Log) -> LoggedCall | None:
    """Read a log; None if it is incomplete, or of another build."""
    end = _LENGTH_BYTES + int.from_bytes(log.head[:_LENGTH_BYTES], "little")
    values = orjson.loads(log.head[_LENGTH_BYTES:end])
    if values["format"] not in (_FORMAT, _WITH_IMAGES, _WITH_ROUTES):
        return None
    turn = Turn(log.call)
    if values["details"] is None:
        refused, age_s = values.get("refused", False), log.age_s + values.get("age_s", 0.0)
        return LoggedCall(log, values["request_key"], np.empty(0, np.int32), None, turn, refused, age_s)
    count, spans, turn.engine, turn.pauses, turn.disputed, first_token_s = orjson.loads(log.state)
    if len(log.body) < count * TOKEN_BYTES or sum(span[1] for span in spans) != count:
        return None
    tokens = np.frombuffer(log.body, _TOKEN, count)
    turn.ids, turn.logprobs = tokens["id"].tolist(), tokens["logprob"].tolist()
    turn.spans = [Span(*span) for span in spans]
    details = _details(values["details"], first_token_s)
    length = values.get("prompt", -1)
    prompt = np.frombuffer(log.head, "<i4", length, end).astype(np.int32)
    if "routes" in values:
        turn.routes = TurnRoutes.restored(values["routes"], log.head[end + 4 * length :], length)
    images = tuple(ImageSpan(*image) for image in values.get("images", ()))
    return LoggedCall(log, values["request_key"], prompt, details, turn, images=images)


def top_of(turn: Turn) -> list[list[tuple[int, float]]]:
    """Return the alternatives to tokens of another process: the tokens themselves, since alternatives are not logged."""
    return [[token] for token in zip(turn.ids, turn.logprobs, strict=True)]


def finish_of(turn: Turn, sampling: Sampling) -> FinishReason | None:
    """Return the finish reason of logged tokens that are complete; None if some are missing. The log itself has no finish
    reason."""
    if turn.ids and turn.ids[-1] in sampling.stop_token_ids:
        return "stop"
    return "length" if len(turn.ids) >= sampling.max_tokens else None


def _details(values: dict[str, Any], first_token_s: float | None) -> TurnDetails:
    used = values.pop("used")
    used["logit_bias"] = {int(token): bias for token, bias in used["logit_bias"].items()}
    return TurnDetails(**{**values, "used": Sampling(**used), "first_token_s": first_token_s})
