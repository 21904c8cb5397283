"""An agent of the `anthropic` package with a tool. The package reads ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY by itself.

gateway episodes run --tasks examples/agents/tasks.jsonl --group-size 4 -- python examples/agents/anthropic_sdk.py
"""

from __future__ import annotations

import json
import os
from typing import Any

import anthropic

ADD: Any = {
    "name": "add",
    "description": "The sum of two numbers.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}


def main() -> None:
    task = json.loads(os.environ["HEADGATE_TASK"])
    client = anthropic.Anthropic()
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    for _ in range(4):
        reply = client.messages.create(
            model="policy",
            max_tokens=128,
            tools=[ADD],
            messages=messages,
            system="Answer with the number alone.",
        )
        if reply.stop_reason != "tool_use":
            break
        messages.append({"role": "assistant", "content": reply.content})
        messages.append(
            {
                "role": "user",
                "content": [answer(block) for block in reply.content if block.type == "tool_use"],
            }
        )
    text = "".join(block.text for block in reply.content if block.type == "text")
    print(1.0 if text.strip() == task["answer"] else 0.0)


def answer(block: Any) -> dict[str, Any]:
    """Return the result of one call; a wrong call gets one too, so that the model can do better."""
    numbers = [block.input.get("a"), block.input.get("b")]
    result = str(sum(numbers)) if all(isinstance(n, int) for n in numbers) else "Error: a and b are numbers"
    return {"type": "tool_result", "tool_use_id": block.id, "content": result}


if __name__ == "__main__":
    main()
