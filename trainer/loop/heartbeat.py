"""The first rank's heartbeat: it finds out who is gone while there is nothing to compute, and says that it is there."""

from __future__ import annotations

import asyncio

from trainer import orders
from trainer.learner import Learner
from trainer.loop.children import Watched


def heartbeat(learner: Learner) -> Watched | None:
    """The task that ends, with RankLost, when a rank is lost; None where there is one rank."""
    return Watched("heartbeat of the ranks", _beat(learner)) if learner.ranks.size > 1 else None


async def _beat(learner: Learner) -> None:
    while True:
        await asyncio.sleep(learner.ranks.beat_s)
        await asyncio.to_thread(orders.beat, learner)
