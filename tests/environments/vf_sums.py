"""A taskset of verifiers, with a harness that needs no process of its own."""

from __future__ import annotations

import aiohttp
import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        if trace.last_reply == "crash":
            raise ValueError("the scorer is broken")
        return float(self.data.answer in trace.last_reply)


class SumConfig(vf.TasksetConfig):
    size: int = 40


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self) -> list[SumTask]:
        return [
            SumTask(SumData(prompt=f"{n} + {n}", answer=str(2 * n)), self.config.task)
            for n in range(self.config.size)
        ]


class DirectHarness(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> vf.ProgramResult:
        body = {"model": ctx.model, "messages": [{"role": "user", "content": data.prompt}], "max_tokens": 8}
        headers = {"Authorization": f"Bearer {secret}"}
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{endpoint}/chat/completions", json=body, headers=headers) as answer,
        ):
            answer.raise_for_status()
            await answer.read()
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["DirectHarness", "SumTaskset"]
