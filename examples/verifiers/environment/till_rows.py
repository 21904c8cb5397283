"""The rows of the till's dataset: what was in it, and what came in and went out since."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A question, and the amounts in the till after each move; the last is the answer."""

    question: str
    amounts: tuple[int, ...]
    moves: tuple[int, ...]
    start: int


def rows() -> Iterator[Row]:
    """Return all rows in an arbitrary order."""
    found = [
        _row(start, moves)
        for start in range(20)
        for moves in itertools.product([*range(-9, 0), *range(1, 10)], repeat=2)
    ]
    return iter(sorted(found, key=lambda row: _digest(row.question)))


def in_dataset(row: Row) -> bool:
    """Return true for the half of the rows that the dataset has."""
    return _digest(row.question)[0] % 2 == 0


def _row(start: int, moves: tuple[int, ...]) -> Row:
    text = "".join(f" in {move}" if move > 0 else f" out {-move}" for move in moves)
    amounts = tuple(itertools.accumulate(moves, initial=start))[1:]
    return Row(f"till {start}{text}", amounts, moves, start)


def _digest(question: str) -> bytes:
    return hashlib.sha256(question.encode()).digest()
