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
import itertools
import json
import tempfile
from collections.abc import Iterator
from contextvars import Context, ContextVar, copy_context
from typing import Any

from inspect_ai import SampleSource, enqueue_sample, eval_async, task_with
from inspect_ai._eval.loader import load_tasks
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, get_model, modelapi
from inspect_ai.model._providers.openai_compatible import OpenAICompatibleAPI
from inspect_ai.scorer import value_to_float
from inspect_ai.solver import Generate, Solver, TaskState, solver

from gateway.environments.base import Found, Played, PlayFailed

_Route = tuple[str, str]
"""The base URL and the key of an episode."""
_route: ContextVar[_Route | None] = ContextVar("route", default=None)
_CONCURRENT = 1024


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
        self._running: asyncio.Task[Any] | None = None

    def tasks(self) -> Iterator[Found]:
        for index, sample in enumerate(self._samples):
            content = sample.model_dump(mode="json", include={"input", "target", "choices"})
            yield Found(json.dumps(content, sort_keys=True), {"index": index})

    async def open(self) -> None:
        before = self._task.setup or []
        setup = [_routed(self._source.routes), *(before if isinstance(before, list) else [before])]
        task = task_with(self._task, dataset=self._source, setup=setup, epochs=1, fail_on_error=False)
        running = eval_async(
            task,
            get_model("headgate/policy", config=self._config, memoize=False),
            log_dir=self._log.name,
            max_samples=_CONCURRENT,
            log_realtime=False,
            log_samples=False,
        )
        self._running = asyncio.create_task(running, name="inspect")

    async def play(self, data: dict[str, Any], base_url: str, api_key: str) -> Played:
        assert self._running is not None, "open it first"
        done = await self._source.run(self._samples[data["index"]], (base_url, api_key), self._running)
        if done.error is not None:
            raise PlayFailed(done.error.message)
        return self._played(done)

    def _played(self, done: Any) -> Played:
        """The reward in a sample's scores. Raises PlayFailed if there is none."""
        named: dict[str, float] = {}
        for scorer, score in (done.scores or {}).items():
            values = score.value if isinstance(score.value, dict) else {"": score.value}
            named |= {f"{scorer}.{key}".rstrip("."): value_to_float()(value) for key, value in values.items()}
        if self._metric in named:
            return Played(named[self._metric], named)
        if not self._metric and len(named) == 1:
            return Played(next(iter(named.values())), named)
        raise PlayFailed(
            f"the argument `metric` names none of the scores: {', '.join(named) or 'none'}", "grading_failed"
        )

    async def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})
        self._log.cleanup()


class _Source(SampleSource):
    """Samples that are added to a running evaluation, each with the episode that its calls belong to."""

    def __init__(self) -> None:
        self.routes: dict[str, _Route] = {}
        self._done: dict[str, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._idle: asyncio.Future[list[Sample]] | None = None
        """Inspect waits here while no sample is under way."""
        self._context: Context | None = None
        self._begun = asyncio.Event()

    async def run(self, sample: Sample, route: _Route, evaluation: asyncio.Task[Any]) -> Any:
        """Inspect's record of a sample, once it has ended. Raises PlayFailed if the evaluation ends before."""
        name = f"{sample.id}#{next(self._numbers)}"
        done = self._done[name] = asyncio.get_running_loop().create_future()
        self.routes[name] = route
        try:
            await self._add(sample.model_copy(update={"id": name}, deep=True), evaluation)
            await asyncio.wait({done, evaluation}, return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                raise PlayFailed(f"inspect's evaluation has ended: {evaluation.exception()!r}")
            return done.result()
        finally:
            del self.routes[name], self._done[name]

    async def _add(self, sample: Sample, evaluation: asyncio.Task[Any]) -> None:
        begun = asyncio.ensure_future(self._begun.wait())
        await asyncio.wait({begun, evaluation}, return_when=asyncio.FIRST_COMPLETED)
        begun.cancel()
        if self._idle is not None and not self._idle.done():
            self._idle.set_result([sample])
        elif self._context is not None:
            self._context.run(enqueue_sample, sample)

    async def next_samples(self) -> list[Sample] | None:
        self._context = copy_context()
        self._begun.set()
        self._idle = asyncio.get_running_loop().create_future()
        return await self._idle

    async def sample_complete(self, sample: Any) -> list[Sample] | None:
        if (done := self._done.get(str(sample.id))) is not None and not done.done():
            done.set_result(sample)
        return None


@modelapi(name="headgate")
class _Episodes(OpenAICompatibleAPI):
    """A model whose requests go to the episode of the sample that makes them."""

    def __init__(self, model_name: str, config: GenerateConfig, **_: Any) -> None:
        super().__init__(model_name, "http://unused", "unused", config, service="headgate")

    @property
    def client(self) -> Any:
        if (route := _route.get()) is None:  # before any sample
            return self._client
        return self._client.with_options(base_url=route[0], api_key=route[1])

    @client.setter
    def client(self, client: Any) -> None:
        self._client = client

    async def aclose(self) -> None:
        await self._client.close()


@solver
def _routed(routes: dict[str, _Route]) -> Solver:
    """Remembers whose sample this is, before anything else of it runs."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        _route.set(routes[str(state.sample_id)])
        return state

    return solve
