"""A request's places are released however its application ends, also where the request is sent on to another process."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, cast

import pytest
from starlette.types import Receive, Scope, Send

from gateway.api.scope import Release, keep_ticket
from gateway.tenancy.limits import Ticket
from headgate.errors import OwnedByPeer


class Limits:
    """Count the places in use."""

    taken = 1

    def release(self, _holders: tuple[Any, ...], calls: int) -> None:
        self.taken -= calls


async def alive() -> bool:
    return True


@pytest.mark.parametrize(
    "end", [None, OwnedByPeer("http://other", alive), asyncio.CancelledError(), OSError("the client is gone")]
)
async def test_the_ticket_is_released_and_not_before(end: BaseException | None) -> None:
    limits = Limits()

    async def app(scope: Scope, _receive: Receive, _send: Send) -> None:
        keep_ticket({**scope, "path": "/"}, Ticket(limits, (("agent", "a"),)))  # type: ignore[arg-type]
        assert limits.taken == 1
        if end is not None:
            raise end

    nothing = cast(Any, None)
    with suppress(OwnedByPeer, asyncio.CancelledError, OSError):
        await Release(app)({"type": "http"}, nothing, nothing)
    assert limits.taken == 0
