"""How the gateway refuses a request of its admin API."""

from __future__ import annotations

import httpx


class GatewayRefused(Exception):
    """The gateway answered with an error."""

    def __init__(self, status: int, message: str, code: str | None, retry_after: float | None) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message
        self.code = code
        self.retry_after = retry_after


def refusal(response: httpx.Response) -> GatewayRefused:
    """Reads an error that the gateway answered."""
    try:
        error = response.json()["error"]
        message, code = error["message"], error["code"]
    except (ValueError, KeyError, TypeError):
        message, code = f"{response.url} answers as no gateway of headgate does: is the URL right?", None
    retry_after = response.headers.get("retry-after")
    return GatewayRefused(response.status_code, message, code, float(retry_after) if retry_after else None)
