"""An agent with tools, written with the `openai` package and nothing of headgate.

A shop's assistant: the model gets the question what an order costs, sees the prices only through the tool `price` and adds up
with the tool `calculate`. Reward: 1.0 for the right total, with 0.1 for having used a tool at all.

To point an agent of your own at headgate, change two values that its client accepts anyway:

    AsyncOpenAI(base_url=base_url, api_key=api_key)

The agent receives both for each episode, and the key identifies the episode: nothing else needs to know of
headgate. What the agent returns is the episode's reward. Run it with

    gateway episodes run --agent examples/tools/agent.py:solve --tasks examples/tools/tasks.jsonl --group-size 8

An agent in another language is a command that finds OPENAI_BASE_URL, OPENAI_API_KEY and HEADGATE_TASK in its
environment, and prints its reward as its last line. Raise (or exit with a status other than 0) when an episode should
not count.
"""

from __future__ import annotations

import ast
import json
import operator
import re
from typing import Any

from openai import AsyncOpenAI

MAX_TURNS = 4
SYSTEM = (
    "You are a shop's assistant. Look prices up with the tools, never guess them. "
    "When you know the total, answer with the number alone."
)
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def tool(name: str, description: str, argument: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS: list[Any] = [
    tool("price", "The price of one item, in euros.", "item"),
    tool("calculate", "The value of an expression of numbers with + - * / and brackets.", "expression"),
]


async def solve(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """Run one episode of at most MAX_TURNS turns, and return the reward of its last answer."""
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": task["question"]},
    ]
    used_tools = False
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(MAX_TURNS):
            reply = await next_message(client, messages)
            messages.append(reply)
            if "tool_calls" not in reply:
                return score(reply["content"], task["total"], used_tools)
            used_tools = True
            for call in reply["tool_calls"]:
                content = use(call["function"], task["prices"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
    return score("", task["total"], used_tools)


async def next_message(client: AsyncOpenAI, messages: list[Any]) -> dict[str, Any]:
    """Return the model's next message, put together from a stream."""
    content = ""
    calls: dict[int, Any] = {}
    stream = await client.chat.completions.create(
        model="policy", messages=messages, tools=TOOLS, max_tokens=256, stream=True
    )
    async for chunk in stream:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            for part in choice.delta.tool_calls or []:
                empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
                call = calls.setdefault(part.index, empty)
                call["id"] += part.id or ""
                if part.function:
                    call["function"]["name"] += part.function.name or ""
                    call["function"]["arguments"] += part.function.arguments or ""
    message = {"role": "assistant", "content": content}
    return {**message, "tool_calls": list(calls.values())} if calls else message


def use(function: dict[str, str], prices: dict[str, float]) -> str:
    """Return a tool's answer; a wrong call gets an answer too, so that the model can do better."""
    try:
        arguments = json.loads(function["arguments"])
        if function["name"] == "price":
            return str(prices.get(arguments["item"], f"Error: we have only {', '.join(prices)}"))
        if function["name"] == "calculate":
            return f"{value(ast.parse(arguments['expression'], mode='eval').body):g}"
    except (ValueError, KeyError, TypeError, SyntaxError, ArithmeticError, RecursionError) as error:
        return f"Error: {error!r}"
    return f"Error: there is no tool {function['name']}"


def value(node: ast.expr) -> float:
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value(node.left), value(node.right))
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return float(node.value)
    raise ValueError("only numbers and + - * / are allowed")


def score(answer: str, total: float, used_tools: bool) -> float:
    numbers = re.findall(r"-?\d+(?:\.\d+)?", answer)
    right = bool(numbers) and abs(float(numbers[-1]) - total) < 0.005
    return 1.0 if right else 0.1 * used_tools
