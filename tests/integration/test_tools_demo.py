"""The demo with tools through the gateway: one unbroken path an episode, and the tokens that the warm start learns from."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from examples.tools_demo import tasks, teacher
from tests.harness.demos import play, small_model
from tests.harness.records import nodes_of, path_to
from tests.harness.scripted import scripted_gateway
from trainer.data.conversations import Rows, sampled_text

AGENT = "examples.tools_demo.agent:solve"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model in small."""
    recipe = Path(tasks.__file__).with_name("warmstart.toml")
    return small_model(recipe, tmp_path_factory.mktemp("tools demo"))


def order(task: dict[str, Any]) -> list[str]:
    items: list[str] = task["question"].splitlines()[1:]
    return items


def replies_of(messages: list[dict[str, Any]]) -> list[str]:
    """Return the assistant's messages, as the model samples them."""
    return [sampled_text(m).removesuffix("<|im_end|>") for m in messages if m["role"] == "assistant"]


async def test_what_the_warm_start_learns_is_what_the_gateway_renders_and_records(
    model: Path, tmp_path: Path
) -> None:
    rows = Rows(Tokenizer.from_file(str(model / "tokenizer.json")))
    async with scripted_gateway(model, tmp_path) as (gateway, engine):
        for number, task in enumerate(islice(tasks.tasks("train", 1), 2)):
            priced = order(task) if number % 2 else order(task)[:2]
            example = teacher.conversation(order(task), task["prices"], priced)
            ids, learned = rows.row(example)

            outcome = await play(gateway, engine, AGENT, task, replies_of(example["messages"]))

            assert outcome.reward == float(priced == order(task))
            assert outcome.components == {"tool_calls": len(priced)}
            assert outcome.episode_id is not None
            nodes = await nodes_of(gateway, outcome.episode_id)
            turns = [node for node in nodes if node["sampled"]]
            last = turns[-1]
            path = path_to(nodes, last)
            assert path + last["ids"] == ids
            sampled = [False] * len(ids)
            for turn in turns:
                start = len(path_to(nodes, turn))
                sampled[start : start + len(turn["ids"])] = [True] * len(turn["ids"])
            assert sampled == learned


WRONG_REPLIES = [
    ['<tool_call>\n{"name": "steal", "arguments": {}}\n</tool_call>'],
    ['<tool_call>\n{"name": "price", "arguments": {"item": "gold"}}\n</tool_call>', "no idea"],
    ['<tool_call>\n{"name": "price", "arguments": {"thing": 1}}\n</tool_call>', "no idea"],
    ['<tool_call>\n{"name": "price", "arguments": {"item": "tea"}}\n</tool_call>'] * 7,
    ["<tool_call>\nnothing\n</tool_call>"],
]


async def test_wrong_replies_earn_nothing_and_fail_no_episode(model: Path, tmp_path: Path) -> None:
    task = next(tasks.tasks("train", 1))
    async with scripted_gateway(model, tmp_path, staleness={"batch": 64}) as (gateway, engine):
        for replies in WRONG_REPLIES:
            engine.replies.clear()
            outcome = await play(gateway, engine, AGENT, task, replies)
            assert outcome.reward == 0.0, replies
