"""An agent of the `openai` package, which reads OPENAI_BASE_URL and OPENAI_API_KEY by itself: nothing here names headgate.

gateway episodes run --tasks examples/agents/tasks.jsonl --group-size 4 -- python examples/agents/openai_sdk.py
"""

from __future__ import annotations

import json
import os

import openai


def main() -> None:
    task = json.loads(os.environ["HEADGATE_TASK"])
    reply = openai.OpenAI().chat.completions.create(
        model="policy",
        messages=[
            {"role": "system", "content": "Answer with the number alone."},
            {"role": "user", "content": task["question"]},
        ],
        max_tokens=64,
    )
    answer = reply.choices[0].message.content or ""
    print(1.0 if answer.strip() == task["answer"] else 0.0)  # the last line is the reward


if __name__ == "__main__":
    main()
