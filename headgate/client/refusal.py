"""How the gateway refuses a request of its admin API, or does not serve it."""

from __future__ import annotations

from typing import Any

import httpx

_LASTING = frozenset({"ledger_broken", "store_down"})
"""Codes of refusals that last until the gateway is restarted, although their status means a temporary failure."""


class GatewayRefused(Exception):
    """The gateway responded with an error."""

    def __init__(self, status: int, message: str, code: str | None, retry_after: float | None) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message
        self.code = code
        self.retry_after = retry_after

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
        message, code = error["message"], error["code"]
    except (ValueError, KeyError, TypeError):
        return NotAGateway(response)
    retry_after = response.headers.get("retry-after")
    return GatewayRefused(response.status_code, message, code, float(retry_after) if retry_after else None)


def cause_of(error: httpx.TransportError) -> str:
    """Return an error of a connection in a few words."""
    return str(error).partition(" ssl:")[0] or type(error).__name__


def no_gateway(url: str, error: httpx.TransportError) -> str:
    """Return why no gateway responds at a URL, and what to do about it."""
    return f"no gateway responds at {url} ({cause_of(error)}): start one, or name its URL with --gateway or HEADGATE_GATEWAY"
