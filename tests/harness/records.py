"""Checks of recorded turns against what the fake engine must have sampled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gateway.engines.fake import identity, next_token
from gateway.render.renderer import ChatRenderer
from tests.harness.gateways import RunningGateway

STOP_TOKENS = [256, 258]
"""The special tokens that the gateway sends for the tiny tokenizer, in its order."""


async def nodes_of(gateway: RunningGateway, episode_id: str) -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = (await gateway.admin.trajectory(episode_id))["nodes"]
    return nodes


def path_to(nodes: Sequence[dict[str, Any]], node: dict[str, Any]) -> list[int]:
    """Return the token ids from the root to a node, without its own."""
    ids: list[int] = []
    while node["parent"] >= 0:
        parent = nodes[node["parent"]]
        ids = parent["ids"][: node["at"]] + ids
        node = parent
    return ids


def intervals_of(turn: dict[str, Any]) -> list[tuple[int, int]]:
    """Return the oldest and the newest version that every token may be of."""
    return [(span[0], span[-1 if len(span) > 2 else 0]) for span in turn["versions"] for _ in range(span[1])]


def versions_of(turn: dict[str, Any]) -> list[int]:
    """Return the version of every token."""
    return [version for version, count in turn["versions"] for _ in range(count)]


def check_sampled_by_the_fake(
    nodes: Sequence[dict[str, Any]],
    turn: dict[str, Any],
    weights: dict[int, Path | str],
    seed: int | None = None,
    *,
    unsure: bool = False,
    endless: bool = False,
) -> None:
    """Assert that every token and log-probability is that of its version's weights after exactly this context.

    `unsure`: of a token that is recorded with several versions, one of them has it. `endless`: the engine had this fault.
    """
    context, stop = path_to(nodes, turn), [] if endless else STOP_TOKENS
    intervals = intervals_of(turn)
    assert unsure or all(oldest == newest for oldest, newest in intervals)
    for token, logprob, (oldest, newest) in zip(turn["ids"], turn["logprobs"], intervals, strict=True):
        known = [version for version in weights if oldest <= version <= newest]
        expected = [next_token(identity(str(weights[v])), context, seed, stop) for v in known]
        assert (token, pytest.approx(logprob, abs=1e-5)) in [(pair[0], pair[1]) for pair in expected]
        context.append(token)


def lasting(model: Any, seed: int | None = None) -> list[dict[str, str]]:
    """Return a question to which the fake engine's reply has 60 to 120 tokens; the weights' path decides which."""
    renderer, weights = ChatRenderer.load(model), identity(str(model.path.resolve()))
    for number in range(1, 400):
        messages = [{"role": "user", "content": "why" * number}]
        context = renderer.render(messages, [])
        for length in range(121):
            if length and context[-1] == STOP_TOKENS[0]:
                break
            context.append(next_token(weights, context, seed, STOP_TOKENS)[0])
        if 60 <= length < 120:
            return messages
    raise AssertionError("no such question")


async def check_everything(
    gateway: RunningGateway, versions: dict[int, Path], agents: list[Any], *, endless: bool = False
) -> int:
    """Nothing is lost, doubled or mislabelled; returns how often a turn went on under another version."""
    crossed = 0
    for episode, counts in agents:
        nodes = await nodes_of(gateway, episode)
        turns = [node for node in nodes if node["sampled"]]
        assert [len(turn["ids"]) for turn in turns] == counts, "received is recorded"
        for turn in turns:
            assert turn["mask_reason"] == ""
            check_sampled_by_the_fake(nodes, turn, versions, endless=endless)
            crossed += len(turn["versions"]) - 1
            numbers = [version for version, _ in turn["versions"]]
            assert numbers == sorted(numbers)
    return crossed
