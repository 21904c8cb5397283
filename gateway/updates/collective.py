"""Versions that are sent directly from a trainer's server to the workers of engines: `[engine] transport = "collective"`.

Each transfer to an engine has its own process group, so an engine that dies interrupts no other transfer. Engines receive while
they sample (`stage`), and are paused only to replace their weights (`load`). An engine that missed a version gets it when it
loads. Every step has a deadline, `[weights] transfer_s`; its error names the step and the engine.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.config import WeightsSettings
from gateway.engines.base import Engine
from gateway.generation.slot import Slot
from gateway.updates.weights_check import Weights
from headgate.errors import EngineError, WeightsMissed
from headgate.http import ERRORS, Session, headers_with
from headgate.weights.manifest import MANIFEST, plan_of

log = logging.getLogger(__name__)
_AT_ONCE = 4
"""Engines that receive concurrently."""
_SLACK = 1.25
"""How much longer a step may take than the operations that it is made of, each of which names itself."""


@dataclass(frozen=True, slots=True)
class _Receivers:
    """The workers of an engine."""

    workers: int
    devices: list[dict[str, str]]


class Collective:
    """The transfers to the engines of one model."""

    def __init__(self, settings: WeightsSettings) -> None:
        self._settings = settings
        self._staged: dict[str, tuple[Engine, int]] = {}
        """The version that each engine has received and not loaded."""
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._http = Session(headers_with(settings.key.get_secret_value() if settings.key else None))

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()

    async def stage_all(self, weights: Weights, slots: Iterable[Slot]) -> None:
        """Make every open engine receive a version while it samples. A failure is logged; the engine receives again when
        it loads."""
        free = asyncio.Semaphore(_AT_ONCE)

        async def stage(slot: Slot) -> None:
            async with free, self._locks[slot.name]:
                try:
                    await self._stage(slot, weights)
                except EngineError as error:
                    log.warning("version %d is sent again when it is loaded: %s", weights.version, error)

        async with asyncio.TaskGroup() as group:
            for slot in [slot for slot in slots if slot.state == "open" and slot.engine is not None]:
                group.create_task(stage(slot), name=f"stage-{slot.name}")

    async def load(self, slot: Slot, weights: Weights) -> None:
        """Make a paused engine load a version; send it first if the engine has missed it.

        Raise EngineError, with the step that failed.
        """
        async with self._locks[slot.name]:
            engine = _engine(slot)
            if self._staged.pop(slot.name, None) != (engine, weights.version):
                await self._stage(slot, weights)
                self._staged.pop(slot.name, None)
            # Without a deadline: `[update] load_s` limits the step, and the engine waits no longer for its own receipt.
            await engine.receive_weights(weights.version, self._settings.transfer_s)

    async def _stage(self, slot: Slot, weights: Weights) -> None:
        engine, reasons = _engine(slot), []
        self._staged.pop(slot.name, None)
        plan = await asyncio.to_thread(_plan, weights)
        async with self._step(slot, "report its workers and their devices"):
            receivers = _Receivers(await engine.workers(), await engine.devices())
        for source in self._settings.sources:
            try:
                await self._send(slot, engine, source, weights.version, plan, receivers)
            except (*ERRORS, ValueError, KeyError) as error:
                reasons.append(f"{source}: {error or type(error).__name__}")
                continue
            self._staged[slot.name] = engine, weights.version
            return
        raise WeightsMissed(
            f"{slot.name}: version {weights.version} was not sent: {'; '.join(reasons)}", code="not_sent"
        )

    async def _send(
        self,
        slot: Slot,
        engine: Engine,
        source: str,
        version: int,
        plan: dict[str, Any],
        receivers: _Receivers,
    ) -> None:
        """Make one source send to one engine. Raise EngineError if the engine fails, and ValueError if the source does."""
        limit = self._settings.transfer_s
        ask = {
            "backend": self._settings.backend,
            "workers": receivers.workers,
            "timeout_s": limit,
            "devices": receivers.devices,
        }
        async with self._step(slot, f"have {source} open a transfer of version {version}"):
            opened = await self._request("POST", f"{source}/versions/{version}/send", ask)
        join = {
            "version": version,
            "backend": opened["backend"],
            "lanes": opened["lanes"],
            "shown": opened["shown"],
            "address": opened["address"],
            "port": opened["port"],
            "world_size": receivers.workers + 1,
            "plan": plan,
            "timeout_s": limit,
        }
        async with self._step(slot, f"begin to receive version {version}"):
            await engine.receive(join)
        async with self._step(slot, f"receive version {version} from {source}", self._settings.fetch_s):
            outcome = await self._request("GET", f"{source}/sends/{opened['id']}")
        if outcome["state"] != "sent":
            raise ValueError(outcome["why"])

    async def _request(self, method: str, url: str, body: Any = None) -> dict[str, Any]:
        async with self._http.request(method, url, json=body) as response:
            text = await response.text(errors="replace")
        if response.status != 200:
            raise ValueError(f"HTTP {response.status}: {text[:500]}")
        found = json.loads(text)
        if not isinstance(found, dict):
            raise ValueError(f"its response is not an object: {text[:500]}")
        return found

    @asynccontextmanager
    async def _step(self, slot: Slot, step: str, limit: float | None = None) -> AsyncIterator[None]:
        """Yield the deadline of a step of an engine."""
        limit = limit or self._settings.transfer_s * _SLACK
        try:
            async with asyncio.timeout(limit):
                yield
        except TimeoutError as error:
            message = f"{slot.name} did not {step} within {limit:g} s ([weights] transfer_s, fetch_s)"
            raise WeightsMissed(message, code="transfer_late") from error


def _plan(weights: Weights) -> dict[str, list[tuple[int, str]]]:
    """Return the pieces that engines compare with what they receive."""
    try:
        files = json.loads((Path(weights.path) / MANIFEST).read_bytes())["files"]
        return plan_of(files)
    except (OSError, ValueError, KeyError, TypeError) as error:  # BadManifest is a ValueError
        raise EngineError(
            f"version {weights.version} cannot be sent: its manifest needs format 2 ({error})"
        ) from error


def _engine(slot: Slot) -> Engine:
    if slot.engine is None:
        raise EngineError(f"{slot.name} has no engine")
    return slot.engine
