"""The demo on a lake through the gateway: one unbroken path an episode, and the tokens that the warm start learns from."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from examples.frozen_lake import algorithms, tasks, teacher
from examples.frozen_lake.walks import Reading, Walker
from tests.harness.demos import play, small_model
from tests.harness.records import nodes_of, path_to
from tests.harness.scripted import scripted_gateway
from trainer.algorithms import REGISTRY
from trainer.commands.warmstart import Recipe, train_tokenizer
from trainer.data.conversations import END, Rows, sampled_text

RECIPE = Path(tasks.__file__).with_name("warmstart.toml")
AGENT = "examples.frozen_lake.agent:solve"
LAKE = {"task_id": "lake", "map": ["SFFH", "HFHF", "FFHF", "HFFG"]}
ACROSS = ["right", "down", "down", "down", "right", "right"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model in small."""
    return small_model(RECIPE, tmp_path_factory.mktemp("frozen lake"))


def call(direction: str) -> str:
    """A model's tool call that goes one tile."""
    return f'<tool_call>\n{{"name": "move", "arguments": {{"direction": "{direction}"}}}}\n</tool_call>'


def test_the_comparison_knows_every_algorithm(tmp_path: Path) -> None:
    for name in (*REGISTRY, algorithms.FROZEN):
        needed = algorithms.settings_of(tmp_path, name, 1, 1, 1e-3).algorithm.create().needs_components
        assert tuple(needed) == (("reward",) if name == "gdpo" else ())


async def test_what_the_warm_start_learns_is_what_the_gateway_renders_and_records(
    model: Path, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    rows, rng = Rows(tokenizer), random.Random(3)
    async with scripted_gateway(model, tmp_path) as (gateway, engine):
        for task in islice(tasks.tasks("train", 1), 2):
            example = teacher.conversation(task["map"], rng)
            ids, learned = rows.row(example)

            spoke = [
                sampled_text(m).removesuffix("<|im_end|>")
                for m in example["messages"]
                if m["role"] == "assistant"
            ]
            outcome = await play(gateway, engine, AGENT, task, spoke)

            assert outcome.components == {"steps": len(spoke)}
            assert outcome.episode_id is not None
            nodes = await nodes_of(gateway, outcome.episode_id)
            turns = [node for node in nodes if node["sampled"]]
            assert path_to(nodes, turns[-1]) + turns[-1]["ids"] == ids
            sampled = [False] * len(ids)
            for turn in turns:
                start = len(path_to(nodes, turn))
                sampled[start : start + len(turn["ids"])] = [True] * len(turn["ids"])
            assert sampled == learned


@pytest.mark.long
def test_a_step_is_the_two_marks_of_the_call_what_is_between_them_and_the_end() -> None:
    """The figures of the demo depend on it."""
    tokenizer = train_tokenizer(Recipe.load(RECIPE))
    for direction in ("left", "down", "right", "up"):
        assert len(tokenizer.encode(call(direction) + END, add_special_tokens=False).ids) == 4


async def test_a_crossing_is_one_path_whose_tool_results_are_not_trained(model: Path, tmp_path: Path) -> None:
    async with scripted_gateway(model, tmp_path) as (gateway, engine):
        outcome = await play(gateway, engine, AGENT, LAKE, [call(way) for way in ACROSS])

        assert (outcome.reward, outcome.components) == (1.0, {"steps": 6.0})
        assert outcome.episode_id is not None
        nodes = await nodes_of(gateway, outcome.episode_id)
        assert [node["parent"] for node in nodes] == [-1, *range(len(nodes) - 1)]
        assert [bool(node["sampled"]) for node in nodes] == [False, True] * 6
        views = [node["text"] for node in nodes[::2]]
        around = [
            "left: edge, down: hole, right: ice, up: edge",
            "left: ice, down: ice, right: ice, up: edge",
            "left: hole, down: ice, right: hole, up: ice",
            "left: ice, down: ice, right: hole, up: ice",
            "left: hole, down: edge, right: ice, up: ice",
            "left: ice, down: edge, right: goal, up: hole",
        ]
        assert all(seen in text for seen, text in zip(around, views, strict=True))


async def test_a_walk_without_an_engine_has_the_tokens_that_the_gateway_records(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    turns = [tokenizer.encode(call(way) + END, add_special_tokens=False).ids for way in ACROSS]

    tokens = iter([token for turn in turns for token in turn])

    def certain(*_: Any) -> torch.Tensor:
        logits = torch.full((1, tokenizer.get_vocab_size()), -torch.inf)
        logits[0, next(tokens)] = 0.0
        return logits

    monkeypatch.setattr(Reading, "_read", certain)
    [walk] = Walker(model, seed=1).walk([LAKE["map"]])
    async with scripted_gateway(model, tmp_path) as (gateway, engine):
        outcome = await play(gateway, engine, AGENT, LAKE, [call(way) for way in ACROSS])
        assert outcome.episode_id is not None
        nodes = await nodes_of(gateway, outcome.episode_id)

    trained = walk.episode("walk", version=0)
    assert trained.reward == outcome.reward == 1.0
    assert [(bool(n.sampled), n.ids.tolist()) for n in trained.nodes] == [
        (bool(n["sampled"]), n["ids"]) for n in nodes
    ]


WRONG_REPLIES: dict[str, tuple[list[str], int]] = {
    "a hole": ([call("down")], 1),
    "no call": (["I would rather stay."], 0),
    "a stop": ([call("right"), "Here I stay."], 1),
    "no steps left": ([call("left")] * 10, 10),
    "no direction": ([call("south"), call("down")], 2),
    "no argument": (['<tool_call>\n{"name": "move", "arguments": {}}\n</tool_call>', call("down")], 2),
    "no object": (['<tool_call>\n{"name": "swim", "arguments": []}\n</tool_call>', call("down")], 2),
    "no JSON": (["<tool_call>\nnothing\n</tool_call>"], 0),
}
"""Replies, and the steps that they make."""


async def test_wrong_replies_earn_nothing_and_fail_no_episode(model: Path, tmp_path: Path) -> None:
    async with scripted_gateway(model, tmp_path, staleness={"batch": 64}) as (gateway, engine):
        for name, (replies, steps) in WRONG_REPLIES.items():
            engine.replies.clear()
            outcome = await play(gateway, engine, AGENT, LAKE, replies)
            assert (outcome.reward, outcome.components) == (0.0, {"steps": float(steps)}), name
