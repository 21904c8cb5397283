"""The input of a grader: an episode as text (see the package)."""

from __future__ import annotations

import asyncio

from sqlalchemy import Connection

from gateway.grading.base import GradedCall, GradedEpisode, GradedTurn
from gateway.render.renderer import ChatRenderer
from gateway.store import episodes, turns
from gateway.store.database import Database
from gateway.store.records import CallRecord, EpisodeRecord
from gateway.trajectories.tree import TokenTree, TreePosition
from headgate.types import ABANDONED, CRASHED_ATTEMPT


async def describe_episode(database: Database, renderer: ChatRenderer, episode_id: str) -> GradedEpisode:
    """Return a stored episode. Decoding takes as long as its conversations are: it runs in a thread."""

    def read(connection: Connection) -> tuple[EpisodeRecord, list[CallRecord], TokenTree]:
        row = episodes.episode(connection, episode_id)
        assert row is not None
        nodes = turns.nodes(connection, row["model"], [episode_id])[episode_id]
        return row, turns.calls(connection, episode_id), TokenTree(nodes)

    return await asyncio.to_thread(_described, renderer, *await database.read(read))


def _described(
    renderer: ChatRenderer, row: EpisodeRecord, calls: list[CallRecord], tree: TokenTree
) -> GradedEpisode:
    own = [
        call
        for call in calls
        if call["model"] == row["model"]
        and call["finish_reason"] != ABANDONED
        and tree.nodes[call["node"]].mask_reason != CRASHED_ATTEMPT
    ]
    own_turns = [_turn(renderer, tree, call) for call in own]
    return {
        "episode_id": row["id"],
        "task_id": row["task_id"],
        "group_id": row["group_id"],
        "model": row["model"],
        "metadata": row["details"],
        "calls": [_call(call) for call in calls],
        "turns": own_turns,
        "final_text": own_turns[-1]["text"] if own_turns else "",
    }


def _call(call: CallRecord) -> GradedCall:
    return {
        "call_id": call["id"],
        "model": call["model"],
        "requested": call["requested"],
        "finish_reason": call["finish_reason"],
        "reward": call["reward"],
    }


def _turn(renderer: ChatRenderer, tree: TokenTree, call: CallRecord) -> GradedTurn:
    node = tree.nodes[call["node"]]
    ids, prompt = node.ids.tolist(), call["prompt_tokens"]
    path = tree.path(TreePosition(node.index, len(ids), prompt + len(ids)))
    if ids and ids[-1] in renderer.marks.stop:
        ids = ids[:-1]
    return {
        "call_id": call["id"],
        "prompt_text": renderer.decode(path[:prompt].tolist()),
        "text": renderer.decode(ids),
    }
