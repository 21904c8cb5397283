"""Log levels of refusals: those that resolve by themselves are not errors."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace

import pytest
from fastapi import Request
from prometheus_client import Counter

from gateway.api.errors import NOT_BEGUN, error_response, refusal
from gateway.cluster.follower import Follower
from headgate.errors import BadRequest, EngineError, Fenced, GatewayError, NotAccepted, Unavailable
from scheduler.program.placement import PlacementSettings
from tests.harness.waiting import turns

BUSY = Unavailable("no engine is ready", retry_after=1.0)


@pytest.mark.parametrize(
    ("path", "error", "level"),
    [
        ("/readyz", BUSY, logging.INFO),
        ("/v1/chat/completions", BUSY, logging.WARNING),
        ("/admin/v1/weights", Fenced("another one decides", retry_after=1.0), logging.WARNING),
        ("/v1/chat/completions", EngineError("it failed"), logging.ERROR),
        ("/readyz", GatewayError("it failed"), logging.ERROR),
        ("/v1/chat/completions", BadRequest("no"), None),
    ],
)
def test_the_level_of_a_refusal(
    path: str, error: GatewayError, level: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    errors = Counter("errors", "errors by status", ["status", "code"], registry=None)
    app = SimpleNamespace(
        state=SimpleNamespace(services=SimpleNamespace(metrics=SimpleNamespace(errors=errors)))
    )
    scope = {"type": "http", "method": "GET", "path": path, "headers": [], "query_string": b"", "app": app}
    caplog.set_level(logging.INFO)
    assert refusal(Request(scope), error).status_code == error.status
    assert [record.levelno for record in caplog.records] == ([level] if level else [])


def test_only_a_request_that_was_not_begun_has_the_header_for_it() -> None:
    assert NOT_BEGUN in error_response(NotAccepted("it ends", retry_after=1.0), "/v1/models").headers
    assert NOT_BEGUN not in error_response(BUSY, "/v1/models").headers


async def test_a_background_task_of_a_follower_logs_its_failure(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise RuntimeError("it failed")

    follower = Follower("p", "http://p", "key", {}, [], 60.0, PlacementSettings())
    follower._run_in_background(fail(), "end-ep-1")
    (task,) = follower._ending
    await asyncio.wait({task})
    await turns(1)
    assert not follower._ending
    assert [(r.levelno, r.getMessage()) for r in caplog.records] == [
        (logging.ERROR, "end-ep-1 failed: it failed")
    ]
