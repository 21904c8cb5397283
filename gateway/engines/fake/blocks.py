"""Weights that name themselves in every token that they sample: a directory with a `block.json`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

SHARPNESS = 30.0
VOCABULARY = 272


@dataclass(frozen=True, slots=True)
class Block:
    """The tokens `first` to `first` + `size` - 1: the digits of one version's weights.

    Without `digits` they come by position. With `digits` = (A, B), the tokens A to B - 1 are the digits of all versions, block
    after block, and the next digit is one more than that of the last token; any other token counts as the last digit. Real
    weights from tests/faults/weights.py do the same, down to their log-probabilities.
    """

    first: int
    size: int
    digits: tuple[int, int] | None = None

    @classmethod
    def read(cls, weights: str) -> Block | None:
        """Return the block of a checkpoint directory, if it has one."""
        file = Path(weights) / "block.json"
        if not file.exists():
            return None
        return cls._parsed(file.read_bytes())

    @classmethod
    def of_header(cls, data: bytes) -> Block | None:
        """Return the block that a safetensors file names in its header, for engines that have no directory."""
        end = 8 + int.from_bytes(data[:8], "little")
        value = orjson.loads(data[8:end]).get("__metadata__", {}).get("block")
        return cls._parsed(value) if value else None

    @classmethod
    def _parsed(cls, text: str | bytes) -> Block:
        value = orjson.loads(text)
        digits = value.get("digits")
        return cls(value["first"], value["size"], None if digits is None else (digits[0], digits[1]))

    def next(self, context: Sequence[int]) -> int:
        """Return the token that follows."""
        return self._after(context[-1]) if self.digits else self.first + len(context) % self.size

    def logprob(self, previous: int, token: int) -> float:
        """Return the log-probability (nats) of a token under real weights that count."""
        certain = -math.log1p((VOCABULARY - 1) * math.exp(-SHARPNESS))
        return certain if token == self._after(previous) else certain - SHARPNESS

    def _after(self, previous: int) -> int:
        start, end = self.digits or (0, 0)
        digit = (previous - start) % self.size if start <= previous < end else self.size - 1
        return self.first + (digit + 1) % self.size
