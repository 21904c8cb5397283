"""An agent of OpenAI's Agents SDK with a tool. OPENAI_BASE_URL and OPENAI_API_KEY in the environment are all that it knows.

gateway episodes run --tasks examples/agents/tasks.jsonl --group-size 4 -- python examples/agents/openai_agents_sdk.py
"""

from __future__ import annotations

import json
import os

from agents import Agent, ModelSettings, Runner, function_tool, set_tracing_disabled
from agents.exceptions import MaxTurnsExceeded, ModelBehaviorError


@function_tool
def add(a: int, b: int) -> int:
    """Return the sum of two numbers."""
    return a + b


def main() -> None:
    set_tracing_disabled(True)  # traces would go to OpenAI
    task = json.loads(os.environ["HEADGATE_TASK"])
    agent = Agent(
        name="adder",
        instructions="Add with the tool. Then answer with the number alone.",
        tools=[add],
        model="policy",
        model_settings=ModelSettings(max_tokens=128),
    )
    try:
        answer = str(Runner.run_sync(agent, task["question"], max_turns=4).final_output)
    except (MaxTurnsExceeded, ModelBehaviorError):
        answer = ""  # the model's fault, so it earns 0; any other error ends the program, and the episode does not count
    print(1.0 if answer.strip() == task["answer"] else 0.0)


if __name__ == "__main__":
    main()
