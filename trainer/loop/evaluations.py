"""Evaluations during training: each a process of its own (`trainer.evaluation.child`), at most one at a time.

Its request is written before it begins, its result appears atomically at its end, and `metrics.jsonl` gets its line after that.
So a new start knows which evaluations ended, which are not repeated, and which were interrupted. An evaluation that fails is
reported, and training continues. Owns the process, and the files under `evaluations` of `[run] dir`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from headgate.processes.child import LocalProcess
from headgate.processes.errors import ChildDied
from trainer.config.settings import Settings
from trainer.evaluation.child import Request
from trainer.evaluation.episodes import Evaluation
from trainer.evaluation.figures import scalars
from trainer.loop.feed import Feed
from trainer.report.metrics import Metrics

_STOP_S = 10.0
"""Seconds in which an evaluation that is stopped may abandon its episodes."""
_REQUEST, _RESULT = "request-{:08d}.json", "version-{:08d}.json"


class Evaluations:
    """Evaluates the live version every `[eval] every` steps; without that setting, nothing."""

    def __init__(
        self,
        settings: Settings,
        url: str,
        feed: Feed,
        metrics: Metrics,
        send: Callable[[int, int, Mapping[str, float]], None],
    ) -> None:
        """`url`: the gateway's; `send` reports figures to it, by step and version. Raise ConfigError without an agent."""
        self._send = send
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
            self._evaluation = Evaluation.of(settings)

    @property
    def running(self) -> bool:
        """True while an evaluation runs."""
        return self._running is not None and not self._running.done()

    async def resume(self) -> None:
        """Report what a killed trainer did not, and repeat the evaluation that it interrupted if its version is still live."""
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
                self._metrics.notify(
                    f"the evaluation of version {request.version} was interrupted, and engines run a later one"
                )
                path.unlink()

    async def begin(self, version: int, steps: int, last: bool) -> None:
        """Begin the evaluation of the trainer's version, if it is due, not made yet, and the version is live.

        `last`: no version follows this one.
        """
        if not self.is_due(steps, last):
            return
        if version in self._begun or self._result(version).exists():
            return
        if (await self._feed.status())["newest_version"] != version:
            return
        if self.running:
            if not last:
                self._metrics.notify(
                    f"version {version} is not evaluated: the evaluation before it has not ended"
                )
                return
            await self.finish()
        await self._start(version, steps)

    def is_due(self, steps: int, last: bool) -> bool:
        """Return true if the version after `steps` steps is to be evaluated once it is live."""
        if self._evaluation is None:
            return False
        return last or steps % (self._settings.every or 1) == 0

    async def release_engines(self) -> None:
        """Wait until engines may load another version: with `[eval] pinned`, until the evaluation has ended."""
        if self._settings.pinned:
            await self.finish()

    async def finish(self) -> None:
        """Wait for the running evaluation, if there is one."""
        if self._running is not None:
            await asyncio.wait({self._running})
            self._running.result()

    async def close(self) -> None:
        """Stop the running evaluation; a new start repeats it."""
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
                    output = process.output().strip().splitlines()
                    why = (output[-1] if output else f"it ended with {status}") + f"; see {log}"
            finally:
                await process.stop(_STOP_S)
        except TimeoutError:
            why = f"it took longer than [eval] timeout_s = {limit:g} s"
        except ChildDied as error:
            why = str(error)
        if why:
            self._metrics.notify(f"the evaluation of version {version} failed, and training continues: {why}")
            self._request(version).unlink()
            return
        self._report(request)

    def _report(self, request: Request) -> None:
        result = json.loads(self._result(request.version).read_text())
        self._metrics.evaluated(request.version, request.step, result)
        self._send(request.step, request.version, scalars(result))

    def _request(self, version: int) -> Path:
        return self.directory / _REQUEST.format(version)

    def _result(self, version: int) -> Path:
        return self.directory / _RESULT.format(version)
