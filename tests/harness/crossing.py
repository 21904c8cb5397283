"""Updates that requests cross for certain, whatever the pace of engines, clients and the machine.

An engine samples faster than a busy machine's clients read, so what a gateway has received says little of what is left to sample.
An engine is therefore frozen in the middle of its requests, by the engine's own account, before an update holds it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from unittest import mock

from gateway.errors import EngineError
from gateway.rollout.slot import Slot
from gateway.rollout.steps import EngineSteps
from scheduler.program.events import Do
from tests.harness.waiting import within

LIMIT_S = 600.0
HOLD_S = 2 * LIMIT_S
"""A `[update] hold_s` that outlasts the wait."""
_AGAIN_S = 0.05


@contextmanager
def crossed(requests: int, wanted: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Updates hold an engine only when it is frozen with so many requests under way, which they then cross.

    `wanted` is called when an update begins to wait for them. An engine that is lost is not waited for.
    """
    run = EngineSteps.run

    async def run_in_the_middle(self: EngineSteps, do: Do) -> None:
        if do.step == "hold":
            wanted()
            await freeze(self._pool.slots[do.engine], requests)
        await run(self, do)

    with mock.patch.object(EngineSteps, "run", run_in_the_middle):
        yield


async def freeze(slot: Slot, requests: int) -> None:
    """Freezes an engine as soon as so many requests are under way. Raises EngineError, with how many are."""
    found = 0
    try:
        async with within("the engine has tokens of the call that nobody has taken", LIMIT_S):
            while slot.state == "open" and slot.engine is not None:
                with suppress(EngineError):  # it dies, and its slot will say so
                    found = await under_way(slot)
                    if found >= requests:
                        await slot.engine.pause(keep=True, clear_cache=False)
                        if (found := await under_way(slot)) >= requests:
                            return
                        await slot.engine.resume()
                await asyncio.sleep(_AGAIN_S)
    except TimeoutError as error:
        raise EngineError(
            f"not within {LIMIT_S:g} s: {requests} requests under way in {slot.name}; {found} are"
        ) from error


async def under_way(slot: Slot) -> int:
    """Returns the least number of requests that have had a token and are not at their end.

    The engine says how many have not ended. Those of which the gateway has had no token may be among them.
    """
    load = await slot.engine.look() if slot.engine is not None else None
    if load is None:
        return 0
    fresh = sum(run.last_token_at == run.began for run in slot.runs.values())
    return load.running + load.waiting - fresh
