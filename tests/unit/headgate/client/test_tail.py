"""`gateway tail`: it goes on after the last event that it showed, and no agent's words move the cursor."""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import httpx
import pytest

from headgate.client import GatewayRefused
from headgate.client.events import EventStream

tail = importlib.import_module("gateway.cli.tail")  # the package has the command under the same name


class Stream:
    """Some events, and the error with which the stream ends."""

    def __init__(self, *ids: int, error: Exception | None = None, place: int | None = None) -> None:
        self.ids = ids
        self.error = error
        self.last = place

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        for number in self.ids:
            self.last = number
            yield {"id": number}
        if self.error is not None:
            raise self.error


AWAY = httpx.ConnectError("no server")
STOPPING = GatewayRefused(503, "being stopped", "stopping", 1.0)
OVER = GatewayRefused(401, "no such key", "invalid_admin_key", None)


async def watched(
    streams: list[Stream], *, follow: bool = True
) -> tuple[list[int], list[int | None], Exception | None]:
    """Return the ids that are shown, the places at which streams are opened, and the error that ends it."""
    shown: list[int] = []
    places: list[int | None] = []
    coming: Iterator[Stream] = iter(streams)

    def ask(place: int | None) -> EventStream:
        places.append(place)
        return cast(EventStream, cast(Any, next(coming)))

    try:
        await tail._watch(ask, lambda event: shown.append(event["id"]), follow=follow)
    except (httpx.HTTPError, GatewayRefused) as error:
        return shown, places, error
    return shown, places, None


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail, "_RETRY_S", (0.0,))


async def test_it_goes_on_after_the_last_id_whatever_ended_the_stream(
    capsys: pytest.CaptureFixture[str],
) -> None:
    streams = [
        Stream(1, 2), Stream(error=AWAY), Stream(error=STOPPING), Stream(place=7), Stream(8, error=AWAY), Stream(error=OVER),
    ]  # fmt: skip
    assert await watched(streams) == ([1, 2, 8], [None, 2, 2, 2, 7, 8], OVER)
    lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition("after event ")[2].split()[0] for line in lines] == ["2", "7", "8"]


@pytest.mark.parametrize("error", [AWAY, STOPPING, OVER])
async def test_a_gateway_that_never_responded_is_not_waited_for(error: Exception) -> None:
    assert await watched([Stream(error=error)]) == ([], [None], error)


async def test_without_following_it_ends_with_the_stream_or_its_error() -> None:
    assert await watched([Stream(1)], follow=False) == ([1], [None], None)
    assert await watched([Stream(1, error=AWAY)], follow=False) == ([1], [None], AWAY)


def test_a_line_has_the_facts_and_nothing_that_a_terminal_obeys() -> None:
    event = {
        "id": 7, "at": 0.0, "kind": "episode.closed", "model": "m", "group": "\x1b[2J", "episode": "e",
        "data": {"reward": 1 / 3, "reason": "a\nb", "components": {"x\x9b": 1}, "long": "x" * 1_000},
    }  # fmt: skip
    line = tail.line_of(event, colored=False)
    assert line.isprintable() and len(line) < 500
    for fact in (
        "      7  ",
        "episode.closed",
        "\\x1b[2J",
        "reward=0.333333",
        "reason=a\\x0ab",
        '"x\\u009b": 1',
    ):
        assert fact in line, fact
    assert "\x1b[36mepisode.closed" in tail.line_of({**event, "group": "g"}, colored=True)


def test_a_gap_is_a_line_too() -> None:
    gap = {"id": 15, "kind": "gap", "data": {"why": "forgotten", "from": 4, "to": 15}}
    assert "why=forgotten from=4 to=15" in tail.line_of(gap, colored=False)
