"""The pool of a model's engines, whoever chooses among them."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from gateway.errors import Unavailable
from gateway.rollout.call import Call
from gateway.rollout.placing import Placer, Seeker, SlotPlacer
from gateway.rollout.pool import EnginePool
from gateway.rollout.slot import Slot
from gateway.sections import QueueSettings
from gateway.types import Sampling


class Wrong(SlotPlacer):
    """Answers every call at once with an engine that is not open; after so many answers, that nobody may ask so often."""

    answers = 0

    def seek(self, seeker: Seeker) -> None:
        """See `Placer`."""
        self.answers += 1
        assert self.answers < 1_000_000, "nobody else gets a turn"
        seeker.found.set_result(self._pool.slots["e"])


async def test_a_placer_that_errs_at_once_keeps_nobody_else_from_going_on() -> None:
    pool = EnginePool("demo", QueueSettings(max_wait_s=60.0), 0.0)
    pool.slots["e"] = Slot("e")
    wrong = Wrong(pool)
    placer: Placer = wrong
    pool.placed_by(placer)
    call = Call("c", np.arange(3, dtype=np.int32), Sampling(), pool)
    asking = asyncio.create_task(pool.acquire(call), name="asking")
    await asyncio.sleep(0)
    for _ in range(10):
        await asyncio.sleep(0)  # others go on
    before = wrong.answers
    assert 0 < before < 100
    pool.slots["e"].confirm(0)
    async with asyncio.timeout(60):
        assert (await asking).name == "e"
    pool.slots["e"].state = "held"
    pool._queue = QueueSettings(max_wait_s=0.05)
    with pytest.raises(Unavailable, match="wait for an engine"):
        await pool.acquire(call)
