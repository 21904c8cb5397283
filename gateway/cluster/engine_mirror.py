"""The coordinator's engines in the pools of a follower.

Invariant: output that arrived while there was no link is delivered only if the engine's weights did not change in the meantime.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from gateway.cluster.messages import Message, SlotMessage
from gateway.engines.process import connect
from gateway.generation.pool import EnginePool
from gateway.generation.slot import Slot
from headgate.errors import EngineError

log = logging.getLogger(__name__)


class EngineMirror:
    """The slots of every model's pool."""

    def __init__(self, pools: Mapping[str, EnginePool]) -> None:
        self._pools = pools

    def runs_are_awaited(self) -> bool:
        """Return true if the coordinator waits for an engine's runs to end."""
        slots = (slot for pool in self._pools.values() for slot in pool.slots.values())
        return any(slot.runs and slot.state != "open" for slot in slots)

    def hold(self, reason: str) -> None:
        """Begin no run, and hold output, until the next `apply_all`."""
        for pool in self._pools.values():
            pool.hold(reason)
            for slot in pool.slots.values():
                slot.hold_output()

    def apply_all(self, slots: Sequence[SlotMessage]) -> None:
        """Follow a new link's coordinator, whose engines these are."""
        known = {(slot["model"], slot["name"]) for slot in slots}
        for model, pool in self._pools.items():
            for name in [name for name in pool.slots if (model, name) not in known]:
                pool.slots.pop(name).fail("the coordinator knows no such engine")
        for slot in slots:
            self._settle_output(slot)
            self._apply(slot)

    def on_message(self, message: Message) -> None:
        """Follow a change of one engine."""
        if message["action"] == "slot":
            self._apply(message["slot"])
            return
        pool = self._pools[message["model"]]
        slot = pool.slots.get(message["name"])
        if slot is None:
            return
        if message["action"] == "swap":
            slot.begin_weight_swap(message["version"])
        else:  # forget
            slot.fail("it was removed")
            del pool.slots[slot.name]
            pool.notify()

    async def give_back(self, message: Message) -> None:
        """Have an engine give back the requests that can continue elsewhere."""
        slot = self._pools[message["model"]].slots.get(message["name"])
        if slot is not None and slot.engine is not None:
            try:
                await slot.engine.abort(slot.movable())
            except EngineError as error:
                log.warning("%s did not give requests back: %s", slot.name, error)

    def _settle_output(self, reported: SlotMessage) -> None:
        """Accept the held output of an engine if its weights did not change while there was no link; discard it otherwise."""
        slot = self._pools[reported["model"]].slots.get(reported["name"])
        if slot is None:
            return
        same = (slot.generation, slot.version) == (reported["generation"], reported["version"])
        if same and reported["settled"]:
            slot.release_output()
        else:
            slot.evict("its weights changed while this process had no coordinator")

    def _apply(self, reported: SlotMessage) -> None:
        pool = self._pools[reported["model"]]
        slot = pool.slots.get(reported["name"])
        if slot is None:
            slot = pool.slots[reported["name"]] = Slot(reported["name"], reported["url"])
        slot.follow(reported["url"], owned=not reported["external"], zone=reported["zone"])
        if slot.engine is None and reported["url"] is not None:
            slot.attach(connect(slot.name, reported["url"], reported["api"]))
        slot.mirror_state(reported["state"], reported["reason"], reported["version"], reported["generation"])
        pool.notify()
