"""Every error that the gateway raises on purpose, and what a caller can do about each.

    GatewayError
    ├── BadRequest          the caller must change the request              400; also 404, 405, 408, 415, 431, 501
    │   └── Unprocessable   well-formed, but its content cannot be used     422
    │       └── UnusableVersion     a version's folder; its number stays free       422
    ├── NotAuthenticated    send the right key                              401
    ├── Forbidden           no web page of another site may do this         403
    ├── NotFound            there is no such thing here                     404
    ├── Conflict            the thing is in a state that forbids this       409, never retried
    ├── Busy                try again after `retry_after` seconds           429
    ├── Unavailable         the same, and it is not the caller's share      503
    │   ├── Fenced          another gateway process decides now             503
    │   ├── WeightsUnavailable     no source has a version's bytes now             503
    │   ├── NotAccepted        nothing of it was done: ask another process     503
    │   └── BusUnavailable         what is hot is out of reach                     503, never reaches a caller
    ├── UpstreamFailed      an upstream model's API does not respond         502
    │   └── UpstreamTimedOut    the same, in time; names the step           504
    └── EngineError         an engine failed                                502
        ├── EngineUnreachable
        ├── EngineRefused   the engine rejects the request; any other would too       400
        ├── WeightsMissed   an engine did not receive a version, which may be fine
        ├── EngineReplaced  it was restarted by others, and has other weights
        ├── NotComparable   it cannot compare what it holds with a version
        └── ProbeFailed     an engine does not run the weights it should

`api/errors.py` is the one place that turns them into HTTP.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar

_KEPT = 4000
"""Characters of the error output of an agent or a grader."""


class GatewayError(Exception):
    """The gateway cannot do this."""

    status: int = 500
    type: ClassVar[str] = "server_error"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        quoted: str = "",
        details: dict[str, Any] | None = None,
        status: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`quoted`: the words of another program, which may hold a part of a prompt: they go to clients, not to logs
        (`str`).

        `details`: the error for programs, in the form that Anthropic's clients look for. `status`: in place of the class's.
        `headers`: of the response.
        """
        super().__init__(message)
        self.status = status or self.status
        self.message = f"{message}: {quoted}" if quoted else message
        self.code = code
        self.param = param
        self.details = details
        self.retry_after: float | None = None
        self.headers = headers or {}


class BadRequest(GatewayError):
    """The request is not one that this API knows."""

    status = 400
    type = "invalid_request_error"


def invalid(where: str, what: str, code: str = "invalid_value") -> BadRequest:
    """Return the error for a wrong value at a place of a request, with which the message begins."""
    return BadRequest(f"{where}: {what}", code=code, param=where)


class Unprocessable(BadRequest):
    """The request is well-formed, but what it names cannot be used."""

    status = 422


class UnusableVersion(Unprocessable):
    """The folder that a request publishes is not a version; nothing of it is recorded."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message, code=code, param="path")


class NotAuthenticated(GatewayError):
    """No key, or one that opens nothing."""

    status = 401
    type = "authentication_error"


class Forbidden(GatewayError):
    """The request may come from a web page of another site, and the server has no key."""

    status = 403
    type = "permission_error"


class NotFound(GatewayError):
    """The named thing does not exist."""

    status = 404
    type = "not_found_error"


class Conflict(GatewayError):
    """The thing is in a state that forbids this; the same request will not succeed later."""

    status = 409
    type = "conflict_error"


class Busy(GatewayError):
    """No slot is free now."""

    status = 429
    type = "rate_limit_error"

    def __init__(self, message: str, *, retry_after: float, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after = retry_after


class Unavailable(Busy):
    """The gateway cannot serve the request now."""

    status = 503
    type = "server_error"


class Fenced(Unavailable):
    """Another gateway process has become the coordinator; this one must not write any more what only the coordinator may."""


class WeightsUnavailable(Unavailable):
    """No source of a version's weights responds, or none has it."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retry_after=2.0, code="weights_away")


class NotAccepted(Unavailable):
    """This gateway process does not accept the request: nothing of it was done, and another process may serve it."""


class BusUnavailable(Unavailable):
    """The bus between the gateway processes does not respond; callers continue without it."""

    def __init__(self, message: str, *, stood_still: bool = False) -> None:
        """`stood_still`: this process was stopped during the operation, so that the bus may never have been away."""
        super().__init__(message, retry_after=1.0, code="bus_away")
        self.stood_still = stood_still


class UpstreamFailed(GatewayError):
    """An upstream model's API does not respond."""

    status = 502


class UpstreamTimedOut(UpstreamFailed):
    """An upstream model's API was silent for too long."""

    status = 504


class EngineError(GatewayError):
    """An engine failed."""

    status = 502


class EngineUnreachable(EngineError):
    """An engine does not respond, or went away in the middle of a response."""


class WeightsMissed(EngineError):
    """The engine did not receive the version; the version itself may be fine."""


class EngineRefused(EngineError):
    """An engine refuses a request, as any other engine would: the caller must change it."""

    status = 400
    type = "invalid_request_error"


class EngineReplaced(EngineError):
    """An engine was restarted by others: it lacks the label, and so the weights, that it was given."""


class NotComparable(EngineError):
    """An engine cannot compare what it holds with a version, which proves nothing about either."""


class ProbeFailed(EngineError):
    """An engine does not run the weights that it should."""


def jittered(seconds: float) -> float:
    """Return a `retry_after`, so that those who were refused together do not come back together."""
    return seconds * (0.5 + secrets.randbelow(1000) / 1000)


def shortened(error: str) -> str:
    """Return the beginning of an error, which names it, and its end, which explains most; all of it if it is short."""
    if len(error) <= _KEPT:
        return error
    left, cut = _KEPT // 4, "\n...\n"
    return error[:left] + cut + error[left + len(cut) - _KEPT :]


def validation_error(errors: Sequence[Any], values: Any = None) -> BadRequest:
    """Return pydantic's errors as one of ours: about one field, by its name in the request.

    `values`: the body, which separates fields from branches of a union in pydantic's paths; None: there is none.
    """
    first = errors[0]
    if first["type"] in ("json_invalid", "json_type"):
        return BadRequest(f"the body is not JSON: {first['msg']}", code="invalid_json")
    paths = [(_path(error, values), error) for error in errors]
    same = [(path, error) for path, error in paths if path[:1] == paths[0][0][:1]]
    deepest = max(len(path) for path, _ in same)  # a branch of a union that fits by its type goes furthest
    deepest_errors = [error for path, error in same if len(path) == deepest]
    where = ".".join(map(str, next(path for path, _ in same if len(path) == deepest)))
    if any(error["type"] == "extra_forbidden" for error in deepest_errors):
        return BadRequest(
            f"Unrecognized request argument supplied: {where}", code="unknown_parameter", param=where
        )
    text = _text(deepest_errors)
    return BadRequest(f"{where}: {text}" if where else text, code="invalid_value", param=where or None)


def _path(error: Any, values: Any) -> list[str | int]:
    """Return where in the request an error is, without the branches of unions that pydantic puts into its path."""
    parts = [part for part in error["loc"] if part not in ("body", "query", "path")]
    if values is None or error["loc"][:1] in (("query",), ("path",)):
        return parts
    found: list[str | int] = []
    for part in parts:
        listed = isinstance(values, list) and isinstance(part, int)
        if listed or (isinstance(values, dict) and part in values):
            found.append(part)
            values = values[part]
    return [*found, parts[-1]] if error["type"] == "missing" else found


def _text(errors: Sequence[Any]) -> str:
    """Return what one field should be: the message of a branch of the right type, or all allowed types."""
    of_type = [error for error in errors if not _is_of_another_type(error)]
    chosen = of_type[:1] or errors
    texts = dict.fromkeys(re.sub(r"dictionary( or instance of \w+)?", "object", e["msg"]) for e in chosen)
    start = "Input should be "
    if len(texts) > 1 and all(text.startswith(start) for text in texts):
        return start + " or ".join(text.removeprefix(start) for text in texts)
    return next(iter(texts))


def _is_of_another_type(error: Any) -> bool:
    literal = error["type"] == "literal_error" and not isinstance(error["input"], str)
    return literal or error["type"].endswith("_type")


class OwnedByPeer(Exception):
    """Another gateway process must serve the request: the one at `url` (`api/middleware/forward.py`). Nothing was done."""

    def __init__(self, url: str, alive: Callable[[], Awaitable[bool]]) -> None:
        """`alive`: whether that process still shows signs of life."""
        super().__init__(f"the process at {url} has it")
        self.url = url
        self.alive = alive
