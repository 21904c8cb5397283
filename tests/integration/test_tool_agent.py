"""The example agent with tools, through the gateway, driven as `gateway episodes run` drives it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from headgate.client import EpisodeRunner, load_agent
from headgate.client.agents import read_tasks
from tests.harness.records import nodes_of, path_to
from tests.harness.scripted import scripted_gateway

TOOLS = Path(__file__).parents[2] / "examples" / "tools"


def call(name: str, argument: str, value: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"{argument}": "{value}"}}}}\n</tool_call>'


async def test_the_example_with_tools_earns_its_reward_in_one_unbroken_trajectory(
    tiny_model: Path, tmp_path: Path
) -> None:
    task = read_tasks(TOOLS / "tasks.jsonl")[0]
    async with scripted_gateway(tiny_model, tmp_path) as (gateway, engine):
        engine.replies.extend([call("price", "item", "tea"), call("calculate", "expression", "2 * 3.5"), "7"])
        runner = EpisodeRunner(gateway.admin, load_agent(f"{TOOLS}/agent.py:solve"), mode="eval")
        [outcome] = await runner.run([task])

        assert outcome.error is None
        assert outcome.reward == 1.0
        assert outcome.episode_id is not None
        nodes = await nodes_of(gateway, outcome.episode_id)
        turns = [node for node in nodes if node["sampled"]]
        assert len(turns) == 3
        for earlier, later in pairwise(turns):
            extended = path_to(nodes, earlier) + earlier["ids"]
            assert path_to(nodes, later)[: len(extended)] == extended
        assert "7" in nodes[turns[2]["parent"]]["text"]
