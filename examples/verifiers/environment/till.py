"""A till that is counted: a taskset of verifiers with a rubric of two rewards, and a harness that asks the model once.

vf-eval till        # with this folder on PYTHONPATH
"""

from __future__ import annotations

import aiohttp
import verifiers.v1 as vf
from till_rows import in_dataset, rows


class TillData(vf.TaskData):
    amounts: list[int]


class TillTask(vf.Task[TillData]):
    @vf.reward(weight=0.8)
    async def right(self, trace: vf.Trace) -> float:
        """Return 1 if the last amount is what is in the till at the end."""
        words = trace.last_reply.split()
        return float(words[-1:] == [str(self.data.amounts[-1])])

    @vf.reward(weight=0.2)
    async def working(self, trace: vf.Trace) -> float:
        """Return the share of the amounts that are right, each in its place."""
        words = trace.last_reply.split()
        agree = [one == str(other) for one, other in zip(words, self.data.amounts, strict=False)]
        return sum(agree) / max(len(words), len(self.data.amounts))

    @vf.metric
    async def words(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply.split()))


class TillTaskset(vf.Taskset[TillTask, vf.TasksetConfig]):
    def load(self) -> list[TillTask]:
        return [
            TillTask(TillData(prompt=row.question, amounts=list(row.amounts)), self.config.task)
            for row in rows()
            if in_dataset(row)
        ]


class OneQuestion(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> vf.ProgramResult:  # type: ignore[no-untyped-def]
        body = {"model": ctx.model, "messages": [{"role": "user", "content": data.prompt}]}
        headers = {"Authorization": f"Bearer {secret}"}
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{endpoint}/chat/completions", json=body, headers=headers) as answer,
        ):
            answer.raise_for_status()
            await answer.read()
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["OneQuestion", "TillTaskset"]
