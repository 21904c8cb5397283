"""LangGraph's ReAct agent on LangChain's ChatOpenAI, which reads OPENAI_BASE_URL and OPENAI_API_KEY from the environment.

gateway episodes run --tasks examples/agents/tasks.jsonl --group-size 4 -- python examples/agents/langgraph_agent.py
"""

from __future__ import annotations

import json
import os

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.prebuilt import create_react_agent


@tool
def add(a: int, b: int) -> int:
    """Return the sum of two numbers."""
    return a + b


def main() -> None:
    task = json.loads(os.environ["HEADGATE_TASK"])
    model = ChatOpenAI(model="policy", max_completion_tokens=128)
    agent = create_react_agent(model, [add], prompt="Add with the tool. Then answer with the number alone.")
    try:
        result = agent.invoke({"messages": [("user", task["question"])]}, {"recursion_limit": 8})
        answer = str(result["messages"][-1].content)
    except GraphRecursionError:
        answer = ""  # the model used up its turns, so it earns 0
    print(1.0 if answer.strip() == task["answer"] else 0.0)


if __name__ == "__main__":
    main()
