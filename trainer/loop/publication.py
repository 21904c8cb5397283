"""The way of a version from the learner into engines, beside the training of the next batch.

`begin` copies the weights; a task writes the copy, hands it to the gateway and waits until engines run it. Owns that task.
Invariants: one version is on its way at a time, and no step is made before it is live, so it is the learner's own version until
then; its batch may be acknowledged meanwhile, for nobody has seen a version that is not written, and it can be made anew.
What goes wrong is raised by `finish`, and by `watch` at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from gateway.client import GatewayRefused
from gateway.weights import folders
from trainer.errors import PublishFailed, StepTimeout, VersionRejected
from trainer.learner import Learner
from trainer.loop.checkpoints import Checkpoints
from trainer.loop.children import Watched
from trainer.loop.feed import Feed, naming
from trainer.loop.threads import in_thread
from trainer.publish.filesystem import WeightsDirectory
from trainer.sections.state import WeightsSettings

_REJECTIONS = ("wrong_tensors", "not_finite", "bad_probe")
"""The gateway's codes for weights that will never do."""


class Publication:
    """The versions of a run that are brought to engines."""

    def __init__(
        self,
        settings: WeightsSettings,
        learner: Learner,
        feed: Feed,
        weights: WeightsDirectory,
        checkpoints: Checkpoints,
    ) -> None:
        self.begun = 0
        """The newest version that was begun, or was live before."""
        self._settings = settings
        self._learner = learner
        self._feed = feed
        self._weights = weights
        self._checkpoints = checkpoints
        self._task: asyncio.Task[None] | None = None
        self._began = asyncio.Event()

    async def begin(self) -> None:
        """Takes a copy of the learner's version, unless it is written, and begins to bring it to engines."""
        await self.finish()
        version, parent = self._learner.version, self._learner.parent
        write = None if self._weights.path(version).exists() else await in_thread(self._snapshot)
        self.begun = version
        self._task = asyncio.create_task(self._bring(version, parent, write), name=f"version {version}")
        self._began.set()

    async def finish(self) -> None:
        """Waits until engines run the version that was begun. Raises PublishFailed, StepTimeout or TrainerError."""
        if self._task is not None:
            await asyncio.wait({self._task})
            self._task.result()

    async def close(self) -> None:
        """Gives up the version that is on its way; waits for the thread that writes."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def watch(self) -> Watched:
        """The task that fails as soon as a version cannot be brought to engines."""
        return Watched("publishing of versions", self._watch())

    async def _watch(self) -> None:
        while True:
            await self._began.wait()
            self._began.clear()
            await self.finish()

    def _snapshot(self) -> Callable[[], Path]:
        """Returns what writes the version as it is now, whatever becomes of the learner's weights."""
        learner, adapters = self._learner, None
        if learner.settings.serves_adapters:
            adapters, state = learner.policy.adapters, learner.published_adapter()
        else:
            state = learner.published()
        said = learner.version, learner.parent, learner.model, learner.probe
        return partial(self._weights.write, *said, state, adapters)

    async def _bring(self, version: int, parent: int | None, write: Callable[[], Path] | None) -> None:
        if write is not None:
            try:
                await in_thread(write)
            except (OSError, SafetensorError) as error:
                raise PublishFailed(f"version {version} cannot be written: {error}") from error
            write = None  # frees the copy
        with naming("publish"):
            await self._live(version)
        await in_thread(self._weights.prune, self._settings.keep, version, parent)
        await in_thread(self._learner.prune_checkpoints)

    async def _live(self, version: int) -> None:
        """Hands a written version over, and waits until the engines run it."""
        limit = self._settings.publish_s
        deadline = time.monotonic() + limit
        record: dict[str, Any] = {"state": "updating"}
        while record["state"] == "updating":
            if time.monotonic() > deadline:
                raise StepTimeout("publish", limit, f"version {version} is still updating")
            # Publishing the same version again is safe, and continues where a gateway was restarted in the middle.
            record = await self._offer(version)
        if record["state"] == "failed":
            raise PublishFailed(
                f"no engine came to version {version}: {record['why']}; start the trainer again once engines work"
            )

    async def _offer(self, version: int) -> dict[str, Any]:
        """The gateway's record of a version. Raises VersionRejected, and leaves a note of it for the next start."""
        try:
            path = self._weights.path(version)
            record = await self._feed.publish(version, str(path), self._settings.source)
        except GatewayRefused as refusal:
            if refusal.code not in _REJECTIONS:
                raise
            why = refusal.message
        else:
            if not record["bad"]:
                return record
            why = record["why"]
        await in_thread(self._weights.reject, version, why)
        await self._checkpoints.written()
        raise self.rejected(why)

    def rejected(self, why: str) -> VersionRejected:
        """Returns the error for a version that the gateway refused, with what to do about it."""
        version, saved = self._learner.version, self._learner.saved
        if saved is not None and saved.version == version:
            mine = self._learner.checkpoints / folders.name_of(version)
            way = (
                f"its checkpoint {mine} has the same weights: remove that one, and the next start goes on from the one before,"
                " without the batches since"
            )
        else:
            way = "the next start goes on from the newest checkpoint, without the batches since"
        return VersionRejected(f"version {version} is bad: {why}; engines keep the version before; {way}")
