"""The input of a grader: an episode as text (see the package)."""

from __future__ import annotations

import asyncio

import numpy as np
from numpy.typing import NDArray
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
    own_turns = _turns(renderer, tree, own)
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


def _turns(renderer: ChatRenderer, tree: TokenTree, calls: list[CallRecord]) -> list[GradedTurn]:
    paths = [_path(tree, call) for call in calls]
    turns: list[GradedTurn] = []
    for n, (call, path) in enumerate(zip(calls, paths, strict=True)):
        prompt, ids = call["prompt_tokens"], path[call["prompt_tokens"] :].tolist()
        following = (
            later[len(path) : after["prompt_tokens"]]
            for after, later in zip(calls[n + 1 :], paths[n + 1 :], strict=True)
            if after["prompt_tokens"] > len(path) and np.array_equal(later[: len(path)], path)
        )
        turns.append({
            "call_id": call["id"],
            "prompt_text": renderer.decode(path[:prompt].tolist()),
            "text": renderer.decode(ids[:-1] if ids and ids[-1] in renderer.marks.stop else ids),
            "next_text": renderer.decode(next(following, path[:0]).tolist()),
        })  # fmt: skip
    return turns


def _path(tree: TokenTree, call: CallRecord) -> NDArray[np.int32]:
    """Return the tokens of a call's prompt and reply."""
    node = tree.nodes[call["node"]]
    return tree.path(TreePosition(node.index, len(node.ids), call["prompt_tokens"] + len(node.ids)))
