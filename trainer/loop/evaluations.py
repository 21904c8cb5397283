"""Evaluations beside training: each a process of its own (`trainer.evaluation.child`), at most one at a time.

Its request is written before it begins, its result appears whole at its end, and `metrics.jsonl` gets its line after that. So a
new start knows what has ended, which is not run again, and what was interrupted. What goes wrong in an evaluation is said, and
training goes on. Owns the process, and the files under `evaluations` of `[run] dir`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from processes.child import LocalProcess
from processes.errors import ChildDied
from trainer.evaluation.child import Request
from trainer.evaluation.episodes import Evaluation
from trainer.evaluation.figures import scalars
from trainer.loop.feed import Feed
from trainer.report.metrics import Metrics
from trainer.settings import Settings

_STOP_S = 10.0
"""The time in which an evaluation that is ended gives up its episodes."""
_REQUEST, _RESULT = "request-{:08d}.json", "version-{:08d}.json"


class Evaluations:
    """Evaluates every `[eval] every` steps what the engines run; without that setting, nothing."""

    def __init__(
        self,
        settings: Settings,
        url: str,
        feed: Feed,
        metrics: Metrics,
        tell: Callable[[int, int, Mapping[str, float]], None],
    ) -> None:
        """`url`: the gateway's; `tell`: tells it the figures, by step and version.

        Raises ConfigError where there is no agent to evaluate with.
        """
        self._tell = tell
        self.directory = settings.run.dir / "evaluations"
        self._settings = settings.eval
        self._key = settings.gateway.key
        self._url = url
        self._feed = feed
        self._metrics = metrics
        self._running: asyncio.Task[None] | None = None
        self._begun: set[int] = set()
        """Versions whose evaluation was begun by this process."""
        self._evaluation: Evaluation | None = None
        if settings.eval.every is not None:
            self._evaluation = Evaluation.of(settings.eval, settings.rollout, settings.gateway.model)

    @property
    def under_way(self) -> bool:
        """True while an evaluation runs."""
        return self._running is not None and not self._running.done()

    async def resume(self) -> None:
        """Reports what a killed trainer could not, and begins again what it interrupted if engines still run that version."""
        if self._evaluation is None or not self.directory.exists():
            return
        reported = self._metrics.evaluated_versions()
        for path in sorted(self.directory.glob(_REQUEST.replace("{:08d}", "*"))):
            request = Request.model_validate_json(path.read_text())
            if self._result(request.version).exists():
                if request.version not in reported:
                    self._report(request)
            elif (await self._feed.status())["newest_version"] == request.version:
                await self._start(request.version, request.step)
            else:
                self._metrics.say(
                    f"the evaluation of version {request.version} was interrupted, and engines run a later one"
                )
                path.unlink()

    async def begin(self, version: int, steps: int, last: bool) -> None:
        """Begins the evaluation of the trainer's version, if it is due and was not made, and engines have come to that version.

        `last`: nothing comes after this version.
        """
        if not self.is_due(steps, last):
            return
        if version in self._begun or self._result(version).exists():
            return
        if (await self._feed.status())["newest_version"] != version:
            return
        if self.under_way:
            if not last:
                self._metrics.say(
                    f"version {version} is not evaluated: the evaluation before it has not ended"
                )
                return
            await self.finish()
        await self._start(version, steps)

    def is_due(self, steps: int, last: bool) -> bool:
        """True if the version after so many steps is to be evaluated, which is once engines run it."""
        if self._evaluation is None:
            return False
        if steps == 0:
            return self._settings.at_start
        return last or steps % (self._settings.every or 1) == 0

    async def settle(self) -> None:
        """Waits until the version that the engines run may change: with `[eval] pinned`, its evaluation has ended then."""
        if self._settings.pinned:
            await self.finish()

    async def finish(self) -> None:
        """Waits for the evaluation that is running, if one is."""
        if self._running is not None:
            await asyncio.wait({self._running})
            self._running.result()

    async def close(self) -> None:
        """Ends the evaluation that is running; a new start begins it again."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})

    async def _start(self, version: int, step: int) -> None:
        assert self._evaluation is not None
        self._begun.add(version)
        request = Request(url=self._url, version=version, step=step, evaluation=self._evaluation)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._request(version).write_text(request.model_dump_json())
        self._running = asyncio.create_task(self._run(request), name=f"evaluation of version {version}")

    async def _run(self, request: Request) -> None:
        version, limit = request.version, self._settings.timeout_s
        argv = [sys.executable, "-m", "trainer.evaluation.child"]
        argv += [str(self._request(version)), str(self._result(version))]
        env = {"HEADGATE_ADMIN_KEY": self._key} if self._key else None
        why = ""
        try:
            log = self.directory / "evaluation.log"
            process = await LocalProcess.start(f"the evaluation of version {version}", argv, log, env)
            try:
                async with asyncio.timeout(limit):
                    status = await process.wait()
                if status:
                    said = process.output().strip().splitlines()
                    why = (said[-1] if said else f"it ended with {status}") + f"; see {log}"
            finally:
                await process.stop(_STOP_S)
        except TimeoutError:
            why = f"it took longer than [eval] timeout_s = {limit:g} s"
        except ChildDied as error:
            why = str(error)
        if why:
            self._metrics.say(f"the evaluation of version {version} failed, and training goes on: {why}")
            self._request(version).unlink()
            return
        self._report(request)

    def _report(self, request: Request) -> None:
        result = json.loads(self._result(request.version).read_text())
        self._metrics.evaluated(request.version, request.step, result)
        self._tell(request.step, request.version, scalars(result))

    def _request(self, version: int) -> Path:
        return self.directory / _REQUEST.format(version)

    def _result(self, version: int) -> Path:
        return self.directory / _RESULT.format(version)
