"""Tasks of inspect-ai: their dataset, solver, tools, sandbox and scorers, run by inspect's own machinery.

`inspect:file.py@task`, or `inspect:package/task`. Arguments are the task's own, and
- `metric`: which score is the reward, by the scorer's name (`match`), or that and a key of its value (`match.exact`); without
  it, the only scorer's;
- `config`: settings of inspect's `GenerateConfig`, such as `{"max_tokens": 512}`.

One evaluation of inspect runs for as long as the environment is open; each episode is a sample that is added to it, and the
model `headgate/policy` sends each sample's calls to its episode. A sample that ends in an error, or without a score, has failed.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any
from uuid import uuid4

from inspect_ai import SampleSource, enqueue_sample, eval_async, task_with
from inspect_ai._eval.loader import load_tasks
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, get_model, modelapi
from inspect_ai.model._providers.openai_compatible import OpenAICompatibleAPI
from inspect_ai.scorer import value_to_float
from inspect_ai.solver import Generate, Solver, TaskState, chain, solver

from headgate.environments.base import (
    Found,
    Played,
    PlayFailed,
)

_route: ContextVar[tuple[str, str] | None] = ContextVar("route", default=None)
"""The base URL and the key of the episode whose sample runs."""


class InspectEnvironment:
    """The task `name`."""

    def __init__(
        self, name: str, metric: str = "", config: dict[str, Any] | None = None, **args: Any
    ) -> None:
        (self._task,) = load_tasks([name], args)
        self._samples = list(self._task.dataset)
        self._metric = metric
        self._config = GenerateConfig(**(config or {}))
        self._source = _Source()
        self._log = tempfile.TemporaryDirectory(prefix="headgate-inspect-")

    def tasks(self) -> Iterator[Found]:
        for index, sample in enumerate(self._samples):
            content = sample.model_dump(mode="json", include={"input", "target", "choices"})
            yield Found(json.dumps(content, sort_keys=True), {"index": index})

    async def open(self) -> None:
        setup = chain(_routed(self._source.routes), self._task.setup or [])
        task = task_with(self._task, dataset=self._source, setup=setup, epochs=1, fail_on_error=False)
        unused = {"base_url": "http://unused", "api_key": "unused", "service": "headgate"}
        model = get_model("headgate/policy", config=self._config, memoize=False, **unused)
        running = eval_async(
            task, model, log_dir=self._log.name, max_samples=1024, log_realtime=False, log_samples=False
        )
        self._running = asyncio.create_task(running, name="inspect")

    async def play(self, data: dict[str, Any], base_url: str, api_key: str) -> Played:
        done = await self._source.run(self._samples[data["index"]], (base_url, api_key), self._running)
        if done.error is not None:
            raise PlayFailed(done.error.message)
        named: dict[str, float] = {}
        for scorer, score in (done.scores or {}).items():
            values = score.value if isinstance(score.value, dict) else {"": score.value}
            named |= {f"{scorer}.{key}".rstrip("."): value_to_float()(value) for key, value in values.items()}
        metric = self._metric or (next(iter(named)) if len(named) == 1 else "")
        if metric not in named:
            raise PlayFailed(f"`metric` names none of the scores {list(named)}", "grading_failed")
        return Played(named[metric], named)

    async def close(self) -> None:
        self._source.close()
        self._running.cancel()
        await asyncio.wait({self._running})
        self._log.cleanup()


class _Source(SampleSource):
    """Samples that are added to a running evaluation, each with the episode that its calls belong to."""

    def __init__(self) -> None:
        self.routes: dict[str, tuple[str, str]] = {}
        self._done: dict[str, asyncio.Future[Any]] = {}
        self._added: asyncio.Queue[Sample] = asyncio.Queue()
        self._adding: asyncio.Task[None] | None = None

    async def run(self, sample: Sample, route: tuple[str, str], evaluation: asyncio.Task[Any]) -> Any:
        """Inspect's record of a sample, once it has ended. Raise PlayFailed if the evaluation ends before."""
        name = f"{sample.id}#{uuid4()}"
        done = self._done[name] = asyncio.get_running_loop().create_future()
        self.routes[name] = route
        try:
            self._added.put_nowait(sample.model_copy(update={"id": name}, deep=True))
            await asyncio.wait({done, evaluation}, return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                raise PlayFailed(f"inspect's evaluation has ended: {evaluation.exception()!r}")
            return done.result()
        finally:
            del self.routes[name], self._done[name]

    async def next_samples(self) -> list[Sample]:
        """Inspect waits here while no sample runs; samples that arrive in the meantime are started by a task of its context."""
        self.close()
        first = await self._added.get()
        self._adding = asyncio.create_task(self._add(), name="inspect samples")
        return [first]

    async def _add(self) -> None:
        while True:
            enqueue_sample(await self._added.get())

    async def sample_complete(self, sample: Any) -> None:
        if done := self._done.get(str(sample.id)):
            done.set_result(sample)

    def close(self) -> None:
        if self._adding is not None:
            self._adding.cancel()


@modelapi(name="headgate")
class _Episodes(OpenAICompatibleAPI):
    """A model whose requests go to the episode of the sample that makes them."""

    @property
    def client(self) -> Any:
        route = _route.get()  # none before any sample
        return self._client.with_options(base_url=route[0], api_key=route[1]) if route else self._client

    @client.setter
    def client(self, client: Any) -> None:
        self._client = client


@solver
def _routed(routes: dict[str, tuple[str, str]]) -> Solver:
    """Remember whose sample this is, before anything else of it runs."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        _route.set(routes[str(state.sample_id)])
        return state

    return solve
