"""Serial numbers, as a part of a reactor's state: unlike `itertools.count`, a snapshot can hold them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Serials:
    """Numbers from 1, each given once."""

    last: int = 0

    def __next__(self) -> int:
        self.last += 1
        return self.last
