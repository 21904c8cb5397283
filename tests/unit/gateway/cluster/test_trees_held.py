"""Token trees in memory: a process keeps those of the episodes whose end will be reported to it, and no others."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import AsyncMock, create_autospec

import pytest

from gateway.cluster.follower import Follower
from gateway.cluster.messages import episode_to_json, error_to_json
from gateway.episodes.open_episode import OpenEpisode, closed
from gateway.generation.completion import Completion
from gateway.render.renderer import ChatRenderer
from gateway.store.database import Database
from gateway.trajectories.recorder import Exclusivity, Recorder
from scheduler.program.placement import PlacementSettings


class Trees(Recorder):
    """A recorder whose trees are counted as they come and go."""

    def __init__(self) -> None:
        super().__init__(
            create_autospec(Database), create_autospec(ChatRenderer), "m", AsyncMock(Exclusivity)
        )
        self.held: set[str] = set()

    def begin(self, episode_id: str) -> None:
        super().begin(episode_id)
        self.held.add(episode_id)

    def forget(self, episode_id: str) -> None:
        super().forget(episode_id)
        self.held.discard(episode_id)


class Link:
    """A follower, and the messages of its coordinator."""

    def __init__(self) -> None:
        self.trees = Trees()
        self.follower = Follower("p", "http://p", "key", {}, [self.trees], 60.0, PlacementSettings())

    async def shows(self, episode_id: str) -> OpenEpisode:
        """Have a request identified by the coordinator, and its prompt made."""
        self.follower.linked.set()
        asking = asyncio.create_task(self.follower.named(episode_id, 5.0))
        question: dict[str, Any] = await self.follower._outbox.get()
        live = OpenEpisode(episode_id, "t", "g", "train", "m", 0.0, 0.0)
        self.follower._on_message(
            {"response": question["request"], "episode": episode_to_json(live), "exclusive": False}
        )
        self.trees.begin(episode_id)
        return await asking

    async def ends(self, episode_id: str) -> None:
        """Report the end of an episode as the coordinator does."""
        over = closed(episode_id, "rewarded")
        self.follower._on_message({"action": "end", "id": 1, "episode": episode_id, **error_to_json(over)})
        await asyncio.gather(*self.follower._ending)


def running() -> Any:
    """Return a call."""
    return create_autospec(Completion, instance=True)


@pytest.fixture
def link() -> Link:
    return Link()


async def test_a_lost_link_leaves_the_trees_of_episodes_with_calls_alone(link: Link) -> None:
    busy = await link.shows("busy")
    busy.calls.add(running())
    await link.shows("idle")
    assert link.trees.held == {"busy", "idle"}
    link.follower._unlink()
    assert link.trees.held == {"busy"}, "the end of the idle one will not be reported"
    await link.ends("busy")
    assert not link.trees.held


async def test_trees_do_not_pile_up_over_changes_of_coordinator(link: Link) -> None:
    for number in range(50):
        await link.shows(f"ep-{number}")
        link.follower._unlink()
    assert not link.trees.held and not link.follower.episodes


async def test_an_episode_is_one_object_while_a_request_holds_it(link: Link) -> None:
    """The link is lost between the request's identification and the beginning of its call; then the episode ends."""
    held = await link.shows("ep")
    link.follower._unlink()
    assert await link.shows("ep") is held
    held.calls.add(call := running())
    await link.ends("ep")
    call.stop.assert_awaited_once()


async def test_a_new_coordinator_learns_of_episodes_that_only_a_request_uses(link: Link) -> None:
    held = await link.shows("ep")
    link.follower._unlink()
    assert link.follower.retire() == [held]
