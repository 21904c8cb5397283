"""Fetches a version's files to this gateway and to the machines of its engines over HTTP (docs/topics/weights.md).

An engine on another machine has a mirror there (`gateway mirror`), which fetches a version from the trainer's server or from
another mirror, and returns the path that the engine loads. Without `[weights] sources`, every engine loads the published path.
With `[engine] transport = "collective"` engines receive trained versions from the trainer's server (`collective`); with "lora"
each is an adapter, which is loaded on top of the first version's weights (`adapters`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Set
from pathlib import Path
from typing import Self

import aiohttp

from gateway.config import EngineSettings, WeightsSettings
from gateway.config.engines import MAX_LORAS
from gateway.generation.slot import Slot
from gateway.updates.adapters import load_adapter
from gateway.updates.collective import Collective
from gateway.updates.weights_check import Weights
from headgate.errors import EngineError, NotComparable, WeightsMissed, WeightsUnavailable
from headgate.weights.fan_out import fan_out
from headgate.weights.manifest import MANIFEST, published_tensors
from headgate.weights.mirror import Mirror
from scheduler.policies.proof import ProofReport, weigh

log = logging.getLogger(__name__)
_NEAR = 4
"""Mirrors of its zone that an engine's mirror tries before the source."""


class Distribution:
    """The copies of one model's versions. Use it with `async with`, which owns the connections."""

    def __init__(self, model: str, settings: WeightsSettings, engine: EngineSettings, base: Path) -> None:
        """Create it for the first version's checkpoint, `base`."""
        self._settings = settings
        self._base = str(base.resolve())
        self._collective = Collective(settings) if engine.transport == "collective" else None
        self.max_lora_rank = engine.max_lora_rank if engine.transport == "lora" else None
        """The greatest rank of the adapters that versions are; None if they are whole weights."""
        key = settings.key.get_secret_value() if settings.key else None
        limit = settings.limit_mb_s * 1e6 if settings.limit_mb_s else None
        self._mirror = Mirror(settings.dir / model, key, limit)
        self._holders: tuple[int, Set[str]] = (-1, frozenset())
        """The newest version that was spread, and the mirrors that fetched it."""

    async def __aenter__(self) -> Self:
        await self._mirror.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._collective is not None:
            await self._collective.close()
        await self._mirror.__aexit__(*error)

    @property
    def reads_folders(self) -> bool:
        """True if engines read every version from a folder."""
        return self._collective is None

    def path(self, version: int) -> Path:
        """Return the path of this gateway's copy of a version, which need not exist."""
        return self._mirror.path(version)

    def checkpoint(self, weights: Weights) -> str:
        """Return the path of the checkpoint with which an engine of this machine starts."""
        return self._base if weights.adapter else weights.path

    async def bring(self, version: int, source: str) -> Path:
        """Fetch a version to this gateway. Raise WeightsUnavailable and Unprocessable."""
        limit = self._settings.fetch_s
        try:
            async with asyncio.timeout(limit):
                return await self._mirror.fetch(version, [source])
        except TimeoutError as error:
            message = (
                f"timed out after {limit:g} s fetching version {version} from {source} ([weights] fetch_s)"
            )
            raise WeightsUnavailable(message) from error

    async def spread(self, weights: Weights, slots: Iterable[Slot]) -> None:
        """Make every mirror of these engines fetch a version, or the engines receive it, while they go on with the one
        before. A failure is logged: the engine requests it again when it loads."""
        if self._collective is not None:
            await self._collective.stage_all(weights, slots)
            return
        zones = {slot.mirror: slot.zone for slot in slots if slot.mirror}
        if not weights.source or not zones:
            return

        async def fetch(mirror: str, sources: list[str]) -> None:
            await self._mirror.request(mirror, weights.version, sources)

        limit = self._settings.fetch_s
        try:
            async with asyncio.timeout(limit):
                failed = await fan_out(weights.source, zones, fetch)
        except TimeoutError:
            log.error(
                "not every mirror fetched version %d within %g s ([weights] fetch_s)",
                weights.version,
                limit,
            )
            return
        for mirror, error in failed.items():
            log.error("version %d was not fetched by the mirror %s: %s", weights.version, mirror, error)
        self._holders = weights.version, zones.keys() - failed.keys()

    async def load(
        self, slot: Slot, weights: Weights, slots: Iterable[Slot], check: Callable[[], Awaitable[None]]
    ) -> None:
        """Replace a paused engine's weights by a version's, or load an adapter, paused or not. Raise EngineError.

        `check` is awaited right before.
        """
        if slot.engine is None:
            raise EngineError(f"{slot.name} has no engine")
        if self._collective is not None and (Path(weights.path) / MANIFEST).is_file():
            await check()
            await self._collective.load(slot, weights)
            return
        path = await self._place(slot, weights, slots)
        await check()
        if weights.adapter:
            await load_adapter(slot, weights, path, MAX_LORAS)
        elif self.max_lora_rank is None:
            await slot.engine.load(path)

    async def prove(self, slot: Slot, weights: Weights, slots: Iterable[Slot]) -> ProofReport:
        """Compare what an engine holds with a version, bit by bit and name by name. Raise EngineError if the engine fails."""
        if slot.engine is None:
            raise EngineError(f"{slot.name} has no engine")
        path = await self._place(slot, weights, slots)
        published = await asyncio.to_thread(published_tensors, Path(weights.path))
        try:
            holdings = await slot.engine.prove(weights.version, path, weights.adapter)
        except NotComparable as error:
            return ProofReport("none", why=error.message)
        return weigh(holdings, *(published or (None,)))

    async def _place(self, slot: Slot, weights: Weights, slots: Iterable[Slot]) -> str:
        """Return the path by which an engine loads a version; its mirror fetches what it lacks. Raise EngineError.

        The first version has no manifest, and lies on every machine at the path of the configuration.
        """
        is_copy = weights.path == str(self.path(weights.version).resolve())
        if not slot.mirror or not is_copy:
            return weights.path
        zones = {other.mirror: other.zone for other in slots if other.mirror and other.mirror != slot.mirror}
        version, holders = self._holders
        near = [
            m
            for m, zone in zones.items()
            if zone == slot.zone and version == weights.version and m in holders
        ]
        sources = dict.fromkeys(
            [*near[:_NEAR], weights.source, *self._settings.sources, *sorted(zones.keys() - {*near})]
        )
        try:
            return await self._mirror.request(slot.mirror, weights.version, [s for s in sources if s])
        except (aiohttp.ClientError, OSError, ValueError) as error:
            message = (
                f"{slot.name}: the mirror {slot.mirror} does not have version {weights.version}: {error}"
            )
            raise WeightsMissed(message, code="mirror_failed") from error

    async def prune(self, *needed: int | None) -> None:
        """Remove this gateway's oldest copies, but none that is needed."""
        await self._mirror.prune(self._settings.keep, *needed)
