"""How long a trainer waits for a version that it has published: a trial has no deadline of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from trainer.config.state import PublishSettings
from trainer.errors import StepTimeout
from trainer.loop import publication

UPDATING = {"state": "updating", "bad": False, "why": "", "report": []}
ON_TRIAL = {**UPDATING, "on_trial": True, "why": "on trial"}
LIMIT_S = 600.0
LIVE = {**UPDATING, "state": "live"}


async def publish(*records: dict[str, Any]) -> None:
    """Publish a version to a gateway that responds with these records, after two thirds of the deadline each."""
    seconds, left = [0.0], list(records)

    async def respond(*_: Any) -> dict[str, Any]:
        seconds[0] += LIMIT_S * 2 / 3
        return left.pop(0)

    def now() -> float:
        return seconds[0]

    feed, weights = mock.Mock(publish=respond), mock.Mock(path=lambda version: Path(f"v{version}"))
    waiting = publication.Publication(
        PublishSettings(timeout_s=LIMIT_S), mock.Mock(), feed, weights, mock.Mock()
    )
    with mock.patch("trainer.loop.publication.time.monotonic", now):
        await waiting._until_live(1, new_line=False)


async def test_a_trial_takes_as_long_as_its_conversations_and_a_load_has_a_deadline() -> None:
    await publish(UPDATING, ON_TRIAL, ON_TRIAL, ON_TRIAL, LIVE)
    with pytest.raises(StepTimeout, match="publish"):
        await publish(UPDATING, UPDATING, UPDATING, LIVE)
