"""Publishing a version while the next batch is trained.

`begin` copies the weights; a task writes the copy, publishes it and waits until engines have loaded it. Owns that task.
Invariants: one version is published at a time, and no step is made before it is live, so until then it is the trainer's current
version. Its batch may be acknowledged earlier, because a version that is not written was not used and can be made again.
Errors are raised by `finish`, and by `watch` immediately.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from headgate.client import GatewayRefused
from headgate.weights import folders
from trainer.config.settings import Settings
from trainer.config.state import PublishSettings
from trainer.errors import PublishFailed, StepTimeout, VersionRejected
from trainer.loop.checkpoints import Checkpoints
from trainer.loop.feed import Feed, naming_step
from trainer.loop.nodes import offload_target
from trainer.loop.tasks import Companion, in_thread
from trainer.model import parallel, pretrained
from trainer.model.device import device_of
from trainer.publish.filesystem import WeightsDirectory
from trainer.publish.shown import ShownVersion
from trainer.rank_trainer import RankTrainer

_REJECTIONS = ("wrong_tensors", "not_finite", "bad_probe")
"""The gateway's codes for weights that it refuses permanently."""
_LIVE_S = 600.0
_SLOWEST = 1e7
"""Bytes/s: as the gateway's own bound for engines whose reading it sees."""
_ENGINES_S = 1.0
"""Seconds between two publications while the gateway has no engine to try the version."""


def shown_version(settings: Settings, directory: Path) -> ShownVersion | None:
    """Return where engines find versions in this process's memory, or None without `[publish] transport = "ipc"`.

    It is the host's memory if the accelerator's is given back to engines while the trainer waits.
    """
    if settings.publish.transport != "ipc":
        return None
    device, gives_back = device_of(settings), settings.gateway.nodes and offload_target(settings) is not None
    return ShownVersion(directory, device if device.startswith("cuda") and not gives_back else "cpu")


class Publication:
    """The versions of a run on their way to engines."""

    def __init__(
        self,
        settings: PublishSettings,
        trainer: RankTrainer,
        feed: Feed,
        weights: WeightsDirectory,
        checkpoints: Checkpoints,
        shown: ShownVersion | None = None,
    ) -> None:
        """`shown`: where engines find the version in memory; None if they have it from the folder or the network."""
        self.begun = 0
        """The newest version whose publication was begun, or that was live before."""
        self._settings = settings
        self._trainer = trainer
        self._feed = feed
        self._weights = weights
        self._checkpoints = checkpoints
        self._shown = shown
        self._task: asyncio.Task[None] | None = None
        self._began = asyncio.Event()

    async def begin(self) -> None:
        """Copy the trainer's version, unless it is written, and begin to publish it."""
        await self.finish()
        version, parent = self._trainer.version, self._trainer.parent
        write = None if self._weights.path(version).exists() else await in_thread(self._snapshot)
        self.begun = version
        self._task = asyncio.create_task(
            self._write_and_publish(version, parent, write), name=f"version {version}"
        )
        self._began.set()

    async def finish(self) -> None:
        """Wait until the version that was begun is live. Raise PublishFailed, StepTimeout or TrainerError."""
        if self._task is not None:
            await asyncio.wait({self._task})
            self._task.result()

    async def publish(self) -> None:
        """Publish the trainer's version, and wait until it is live. Raise as `finish`."""
        await self.begin()
        await self.finish()

    async def close(self) -> None:
        """Cancel the publication; wait for the thread that writes."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._shown is not None:
            await in_thread(self._shown.close)

    def watch(self) -> Companion:
        """Return the task that fails as soon as a version cannot be published."""
        return Companion("publishing of versions", self._watch())

    async def _watch(self) -> None:
        while True:
            await self._began.wait()
            self._began.clear()
            await self.finish()

    def _snapshot(self) -> Callable[[], Path]:
        """Return the function that writes the version as it is now, whatever happens to the trainer's weights later."""
        trainer, adapters = self._trainer, None
        if trainer.settings.serves_adapters:
            adapters, state = trainer.policy.adapters, trainer.gather_adapter()
        else:
            state = self._weights_of(trainer)
        return partial(
            self._weights.write,
            trainer.version,
            trainer.parent,
            trainer.model,
            trainer.probe,
            state,
            adapters,
        )

    def _weights_of(self, trainer: RankTrainer) -> dict[str, Tensor]:
        """Return a copy of the weights on the host; where they are shown, copy them into that memory on the way."""
        if self._shown is None:
            return trainer.gather_weights()
        state = trainer.gather_weights("device")
        try:
            self._shown.fill(pretrained.as_stored(trainer.model, state))
        except (OSError, RuntimeError) as error:
            message = (
                f"version {trainer.version} cannot be shown to engines ([publish] transport = 'ipc'): {error}"
            )
            raise PublishFailed(message) from error
        return parallel.on_host(state)

    async def _write_and_publish(
        self, version: int, parent: int | None, write: Callable[[], Path] | None
    ) -> None:
        if write is not None:
            await self._write(version, write)
            write = None  # frees the copy
        with naming_step("publish"):
            await self._until_live(version, new_line=parent is not None and version > parent + 1)
        await in_thread(self._weights.prune, self._settings.keep, version, parent)
        await in_thread(self._trainer.prune_checkpoints)

    async def _write(self, version: int, write: Callable[[], Path]) -> None:
        """Write a version, and then show it, if it is shown."""
        try:
            folder = await in_thread(write)
            if self._shown is not None:
                await in_thread(self._shown.show, folder)
        except (OSError, SafetensorError, ValueError) as error:
            raise PublishFailed(f"version {version} cannot be written: {error}") from error

    async def _until_live(self, version: int, *, new_line: bool) -> None:
        """Publish a written version, and wait until it is live.

        A gateway that was just started has no engines yet, so a version that none has tried is published again.
        """
        limit = self._settings.timeout_s
        if limit is None:
            limit = _LIVE_S + folders.weight_bytes(self._weights.path(version)) / _SLOWEST
        deadline = time.monotonic() + limit
        record: dict[str, Any] = {"state": "updating", "why": ""}
        while record["state"] != "live":
            if time.monotonic() > deadline:
                raise StepTimeout("publish", limit, record["why"] or "it is still updating")
            # Publishing the same version again is safe, and continues where a gateway was restarted in the middle.
            record = await self._publish(version, new_line)
            if record.get("on_trial"):  # as long as its conversations take
                deadline = time.monotonic() + limit
            if record["state"] == "failed":
                if any(row["failure"] for row in record["report"]):
                    raise PublishFailed(
                        f"no engine loaded version {version}: {record['why']}; start the trainer again once engines work"
                    )
                await asyncio.sleep(_ENGINES_S)

    async def _publish(self, version: int, new_line: bool) -> dict[str, Any]:
        """Return the gateway's record of a version. Raise VersionRejected, and leave a note of it for the next start."""
        try:
            path = self._weights.path(version)
            record = await self._feed.publish(version, str(path), self._settings.source, new_line)
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
        """Return the error for a version that the gateway refused, with what to do about it."""
        version, saved = self._trainer.version, self._trainer.saved
        if saved is not None and saved.version == version:
            path = self._trainer.checkpoints / folders.name_of(version)
            remedy = (
                f"its checkpoint {path} has the same weights: remove it, and the next start continues from the one before,"
                " without the batches since"
            )
        else:
            remedy = "the next start continues from the newest checkpoint, without the batches since"
        message = f"version {version} is bad: {why}; engines keep the version before; {remedy}"
        if self._weights.rejected(version - 1) is not None:
            return VersionRejected(f"{message}; version {version - 1} was refused too", lasts=True)
        return VersionRejected(message, lasts=saved is not None and saved.version == version)
