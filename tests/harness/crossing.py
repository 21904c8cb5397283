"""Updates that requests cross for certain, whatever the pace of engines, clients and the machine.

An engine samples faster than a busy machine's clients read, so what a gateway has received shows little of what is left.
An engine is therefore stopped in the middle of its requests, by the engine's own account, before an update holds it: real vLLM
that tests share by its barrier (`tests.harness.vllm`), others by `freeze`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from unittest import mock

from gateway.generation.slot import Slot
from gateway.updates.engine_steps import EngineSteps
from headgate.errors import EngineError
from scheduler.program.events import StepCommand

LIMIT_S = 600.0
HOLD_S = 2 * LIMIT_S
"""A `[update] pause_timeout_s` that outlasts the wait."""
_AGAIN_S = 0.05


@contextmanager
def crossed(stop: Callable[[Slot], Awaitable[None]]) -> Iterator[None]:
    """Let updates hold an engine only when `stop` has halted it in the middle of requests, which they then cross."""
    run = EngineSteps.run

    async def run_in_the_middle(self: EngineSteps, do: StepCommand) -> None:
        if do.step == "hold":
            await stop(self._pool.slots[do.engine])
        await run(self, do)

    with mock.patch.object(EngineSteps, "run", run_in_the_middle):
        yield


async def freeze(slot: Slot, requests: int) -> None:
    """Pause an engine with `requests` requests under way. There must always be new ones: they end while it is looked at.

    An engine that is lost is let be. Raises EngineError, with how many there were.
    """
    found = 0
    try:
        async with asyncio.timeout(LIMIT_S):
            while slot.state == "open" and slot.engine is not None:
                with suppress(EngineError):  # it dies, and its slot will show it
                    if (found := await under_way(slot)) >= requests:
                        await slot.engine.pause(keep=True)
                        if (found := await under_way(slot)) >= requests:
                            return
                        await slot.engine.resume()
                await asyncio.sleep(_AGAIN_S)
    except TimeoutError as error:
        raise EngineError(
            f"not within {LIMIT_S:g} s: {requests} requests under way in {slot.name}; {found} are"
        ) from error


async def under_way(slot: Slot) -> int:
    """Return the least number of requests that have had a token and are not at their end.

    The engine reports how many have not ended. Those of which the gateway has had no token may be among them.
    """
    load = await slot.engine.read_load() if slot.engine is not None else None
    if load is None:
        return 0
    fresh = sum(run.last_token_at == run.began for run in slot.runs.values())
    return load.running + load.waiting - fresh
