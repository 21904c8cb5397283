"""An agent of the `openai` package that replaces its history by the model's own summary, which is trained as all replies are.

gateway episodes run --tasks examples/agents/tasks.jsonl --group-size 4 -- python examples/agents/compacting.py
"""

from __future__ import annotations

import json
import os

import openai

SYSTEM = {
    "role": "system",
    "content": "You work step by step, and remember only what this conversation shows.",
}
STEPS = ("Which numbers are given?", "What do you do with them?", "Do it.")
LONGEST = 4
"""Messages after which the history is summarized."""
SUMMARIZE = "Summarize the conversation for yourself in one sentence. You will see nothing else of it."


def ask(client: openai.OpenAI, messages: list[dict[str, str]], text: str) -> str:
    """Add a question and its reply to the messages; return the reply."""
    if messages[-1]["role"] == "user":  # the summary, to which the question belongs
        text = f"{messages.pop()['content']}\n\n{text}"
    messages.append({"role": "user", "content": text})
    reply = client.chat.completions.create(model="policy", messages=messages, max_tokens=128)  # type: ignore[arg-type]
    messages.append({"role": "assistant", "content": reply.choices[0].message.content or ""})
    return messages[-1]["content"]


def main() -> None:
    task, client = json.loads(os.environ["HEADGATE_TASK"]), openai.OpenAI()
    messages = [SYSTEM, {"role": "user", "content": task["question"]}]
    for step in STEPS:
        ask(client, messages, step)
        if len(messages) > LONGEST:
            summary = ask(client, messages, SUMMARIZE)
            messages = [
                SYSTEM,
                {"role": "user", "content": f"{task['question']} What you did so far: {summary}"},
            ]
    answer = ask(client, messages, "Answer with the number alone.")
    print(1.0 if answer.strip() == task["answer"] else 0.0)  # the last line is the reward


if __name__ == "__main__":
    main()
