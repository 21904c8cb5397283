"""The tasks of the demo on a lake: maps of gymnasium's FrozenLake that can be crossed.

    python -m examples.frozen_lake.tasks --split train --count 2000 --seed 1 --out train.jsonl

Maps are gymnasium's own random ones, without slipping. Owns the split: a map belongs to `heldout` or to `train` by a hash of its
tiles, so the two never share a map, whatever the seeds.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from gymnasium.envs.toy_text.frozen_lake import generate_random_map

from examples.demo.task_file import write_tasks

Split = Literal["train", "heldout"]

SIZE = 4
FROZEN = 0.7
"""The chance that a tile is ice and not a hole; maps without a way across are not used."""
HELDOUT_SHARE = 16
"""One map in this many is held out."""


def split_of(lake: Sequence[str]) -> Split:
    """Return the split that a map belongs to, by its tiles alone."""
    digest = hashlib.sha256("".join(lake).encode()).digest()
    return "heldout" if digest[0] % HELDOUT_SHARE == 0 else "train"


def lakes(split: Split, seed: str) -> Iterator[list[str]]:
    """Map of one split without end; a row is a string of S (start), F (ice), H (hole) and G (goal)."""
    rng = random.Random(seed)
    while True:
        lake: list[str] = generate_random_map(SIZE, FROZEN, seed=rng.getrandbits(32))
        if split_of(lake) == split:
            yield lake


def tasks(split: Split, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the tasks of one split without end, in an order given by the seed."""
    for number, lake in enumerate(lakes(split, f"tasks {seed}")):
        yield {"task_id": f"lake-{split}-{seed}-{number:05d}", "map": lake}


if __name__ == "__main__":
    assert __doc__ is not None
    write_tasks(__doc__.splitlines()[0], tasks)
