"""How the gateway refuses a request of its admin API, or does not serve it."""

from __future__ import annotations

from typing import Any

import httpx

from headgate.feed_version import FEED_VERSION, OLDEST_FEED

_LASTING = frozenset({"ledger_broken", "store_down"})
"""Codes of refusals that last until the gateway is restarted, although their status means a temporary failure."""


class GatewayRefused(Exception):
    """The gateway responded with an error."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None,
        retry_after: float | None,
        param: str | None = None,
    ) -> None:
        """`param`: the field or header of the request that is wrong."""
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message
        self.code = code
        self.retry_after = retry_after
        self.param = param

    @property
    def lasts(self) -> bool:
        """True if waiting does not help."""
        return self.code in _LASTING


class NotAGateway(GatewayRefused):
    """Something else responded in place of a gateway, such as a web server."""

    def __init__(self, response: httpx.Response) -> None:
        root = response.url.copy_with(raw_path=b"/")
        kind = response.headers.get("content-type", "").partition(";")[0] or "no content type"
        message = f"{root} is not a headgate gateway: it responded with {response.status_code} with {kind}"
        super().__init__(response.status_code, message, None, None)

    def __str__(self) -> str:
        return self.message


class OldGateway(Exception):
    """The gateway serves a version of the feed that this client cannot read."""

    def __init__(self, url: str, served: int) -> None:
        version = f"version {served}" if served else "no version"
        super().__init__(
            f"the gateway at {url} serves {version} of the feed, and this client reads {OLDEST_FEED} to {FEED_VERSION}: install a"
            " newer headgate there"
        )


def body_of(response: httpx.Response) -> dict[str, Any]:
    """Return the object in a response of the gateway. Raise NotAGateway."""
    try:
        body = response.json()
    except ValueError:
        raise NotAGateway(response) from None
    if not isinstance(body, dict):
        raise NotAGateway(response)
    return body


def refusal(response: httpx.Response) -> GatewayRefused:
    """Read an error in a response of the gateway."""
    try:
        error = response.json()["error"]
        message, code, param = error["message"], error["code"], error.get("param")
    except (ValueError, KeyError, TypeError):
        return NotAGateway(response)
    retry_after = response.headers.get("retry-after")
    pause_s = float(retry_after) if retry_after else None
    return GatewayRefused(response.status_code, message, code, pause_s, param)


def cause_of(error: httpx.TransportError) -> str:
    """Return an error of a connection in a few words."""
    return str(error).partition(" ssl:")[0] or type(error).__name__


def no_gateway(url: str, error: httpx.TransportError) -> str:
    """Return why no gateway responds at a URL, and what to do about it."""
    return f"no gateway responds at {url} ({cause_of(error)}): start one, or name its URL with --gateway or HEADGATE_GATEWAY"
