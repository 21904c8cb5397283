"""What the teacher of the demo imitates: the replies of `examples.demo.tasks`, without their slips."""

from __future__ import annotations

import random
from collections.abc import Iterator

from examples.demo import tasks


def careful_teacher(seed: int) -> Iterator[tuple[str, str]]:
    """Yield an endless stream of (question, reply) of the training split."""
    rng, known = random.Random(seed), list(tasks.tasks("train", seed))
    while True:
        task = rng.choice(known)
        yield task["question"], tasks.working(task["metadata"]["expression"], rng, slip_chance=0.0)
