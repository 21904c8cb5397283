"""smolagents' ToolCallingAgent.

gateway episodes run --tasks examples/agents/tasks.jsonl --group-size 4 -- python examples/agents/smolagents_agent.py
"""

from __future__ import annotations

import json
import os

from smolagents import LogLevel, OpenAIServerModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Return the sum of two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def main() -> None:
    task = json.loads(os.environ["HEADGATE_TASK"])
    model = OpenAIServerModel(
        "policy",
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        max_tokens=256,
    )
    agent = ToolCallingAgent([add], model, max_steps=4, verbosity_level=LogLevel.OFF)
    answer = agent.run(task["question"] + " Answer with the number alone.")
    print(1.0 if str(answer).strip() == task["answer"] else 0.0)


if __name__ == "__main__":
    main()
