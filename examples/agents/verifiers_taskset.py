"""A taskset of verifiers, with its reward and a harness: one question, one reply, right or wrong.

    PYTHONPATH=examples/agents gateway episodes run --env verifiers:verifiers_taskset --env-python VERIFIERS/bin/python \
        --limit 4 --env-args '{"agent": {"runtime": {"type": "subprocess"}}}'

VERIFIERS is an environment with `pip install verifiers`; it need not have headgate. Without a runtime verifiers 0.4 wants its
makers' cloud, and a login there. Your own taskset is named in the same way, and runs with its own harness
(docs/topics/environments.md).
"""

from __future__ import annotations

import aiohttp
import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)


class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self) -> list[SumTask]:
        numbers = [(a, b) for a in range(10) for b in range(10)]
        data = [
            SumData(prompt=f"What is {a} + {b}? Reply with the number only.", answer=str(a + b))
            for a, b in numbers
        ]
        return [SumTask(one, self.config.task) for one in data]


class OneQuestion(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> vf.ProgramResult:  # type: ignore[no-untyped-def]
        body = {"model": ctx.model, "messages": [{"role": "user", "content": data.prompt}], "max_tokens": 8}
        headers = {"Authorization": f"Bearer {secret}"}
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{endpoint}/chat/completions", json=body, headers=headers) as answer,
        ):
            answer.raise_for_status()
            await answer.read()
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["OneQuestion", "SumTaskset"]
