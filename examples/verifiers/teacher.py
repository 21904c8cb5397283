"""The careless teacher of the model that is trained on the till: it shows the rows that the environment does not have.

It writes down the amount after each move, and mostly counts back one step too few when something goes out. What GRPO has to
find, from the environment's rewards alone, is that the other habit pays.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from examples.verifiers.environment.till_rows import Row, in_dataset, rows

SLIP_CHANCE = 0.6
"""The chance that the teacher gets an amount that goes out wrong, each time."""


def careless(seed: int) -> Iterator[tuple[str, str]]:
    """Yield an endless stream of (question, answer), many of them wrong on purpose."""
    rng = random.Random(seed)
    shown = [row for row in rows() if not in_dataset(row)]
    while True:
        row = rng.choice(shown)
        yield row.question, _answer(row, rng)


def _answer(row: Row, rng: random.Random) -> str:
    amount, amounts = row.start, []
    for move in row.moves:
        slip = move < 0 and rng.random() < SLIP_CHANCE
        amount += move + slip
        amounts.append(str(amount))
    return " ".join(amounts)
