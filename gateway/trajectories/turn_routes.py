"""The experts that the tokens of one call went through (`headgate/routes.py`), gathered over its runs. Pure.

At its end a run's engine reports one row for each input position from the first that is missing (`next`) up to the last token but
one. Invariants:
- the first row of a position stands: tokens of an older version keep their routes when a later run computes them again;
- a row that predicts a token of another run is absent: only that run knew it, and its engine died before it reported;
- a report of another shape is dropped whole, and a row with experts that the model cannot choose becomes absent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from headgate.routes import PackedRoutes, RouterShape, dtype_of
from headgate.types import Node

Reported = npt.NDArray[Any]
"""The rows that an engine reports, of shape [tokens, layers, top_k]; those of layers without a router too, or not."""


class TurnRoutes:
    """The rows of a call's prompt and sampled tokens, from position `first` on."""

    def __init__(self, routers: RouterShape, prompt: int, first: int = 0) -> None:
        """`prompt`: its number of tokens. `first`: the first position whose row is not recorded yet."""
        self.routers = routers
        self.first = first
        self._prompt = prompt
        self._dtype = dtype_of(routers.experts)
        self._absent = np.iinfo(self._dtype).max
        self._rows = self._missing(0)
        self._before = 0
        self.impossible = 0
        """Rows that an engine reported, and that cannot be routes of this model."""

    @classmethod
    def restored(cls, values: Sequence[Any], rows: bytes, prompt: int) -> TurnRoutes:
        """Return the inverse of `saved`. Raise ValueError if the rows are not whole."""
        layers, top_k, experts, total, first, impossible = values
        found = cls(RouterShape(tuple(layers), top_k, experts, total), prompt, first)
        found._rows = np.frombuffer(rows, found._rows.dtype).reshape(-1, *found._rows.shape[1:])
        found.impossible = impossible
        return found

    def saved(self) -> tuple[list[Any], bytes]:
        """Return plain values and rows, with which another process continues."""
        return [*self.routers, self.first, self.impossible], self._rows.tobytes()

    @property
    def next(self) -> int:
        """The first position whose row is missing."""
        return self.first + len(self._rows)

    def begin_run(self, sampled: int) -> None:
        """Start a run after `sampled` tokens."""
        self._before = sampled

    def end_run(self, reported: Reported | None, sampled: int) -> None:
        """Take the rows of a run that ended after `sampled` tokens; None: it reported none."""
        expected = self._prompt + sampled - 1 - self.next
        if reported is None or expected <= 0:
            return
        rows = self._checked(reported, expected)
        if rows is None:
            self.impossible += expected
            return
        # The run computed these again, and another one sampled what they predict
        others = slice(
            max(self._prompt - 1 - self.next, 0), max(self._prompt + self._before - 1 - self.next, 0)
        )
        if self._before:
            rows[others] = self._absent
        self._rows = np.concatenate([self._rows, rows])

    def restart(self) -> None:
        """Forget everything, for the call starts again."""
        self._rows, self.impossible = self._missing(0), 0

    def packed(self, start: int, end: int) -> PackedRoutes | None:
        """Return the rows of the positions from `start` to `end`, absent where they are missing; None if all are."""
        found = self._missing(end - start)
        low, high = max(start, self.first), min(end, self.next)
        if low < high:
            found[low - start : high - start] = self._rows[low - self.first : high - self.first]
        if (found == self._absent).all():
            return None
        return PackedRoutes(found.tobytes(), len(self.routers.layers), self.routers.top_k, self._dtype)

    def attached_to(self, nodes: Sequence[Node]) -> list[Node]:
        """Return the nodes of the turn with their routes in the stored form (`gateway/store/routes.py`)."""
        end = self._prompt + len(nodes[-1].ids)
        found: list[Node] = []
        for node in reversed(nodes):
            start = end - len(node.ids)
            found.append(replace(node, routes=self.packed(start - (node.parent >= 0), end)))
            end = start
        return found[::-1]

    def counts(self, sampled: int) -> dict[str, int]:
        """Return the number of tokens of a turn by what is known of their routes. Its last token was not an input."""
        rows = self._rows[: self._prompt + sampled - 1 - self.first]
        recorded = int((rows != self._absent).any((1, 2)).sum())
        missing = max(self._prompt + sampled - 1 - self.first - recorded - self.impossible, 0)
        return {"recorded": recorded, "missing": missing, "impossible": self.impossible}

    def _missing(self, count: int) -> Reported:
        shape = (count, len(self.routers.layers), self.routers.top_k)
        return np.full(shape, self._absent, np.dtype(self._dtype).newbyteorder("<"))

    def _checked(self, reported: Reported, expected: int) -> Reported | None:
        """Return a report as rows of the layers that have a router; None if it has another shape."""
        routers = self.routers
        if reported.ndim != 3 or reported.dtype.kind not in "iu":
            return None
        others = routers.total_layers - len(routers.layers)
        if others and reported.shape == (expected, routers.total_layers, routers.top_k):
            reported = reported[:, routers.layers]
        if reported.shape != (expected, len(routers.layers), routers.top_k):
            return None
        wrong = _impossible(reported, routers.experts)
        rows = reported.astype(self._rows.dtype)
        rows[wrong] = self._absent
        self.impossible += int(wrong.sum())
        return rows


def _impossible(reported: Reported, experts: int) -> npt.NDArray[np.bool_]:
    """Return which rows name an expert that the model does not have, or one twice in a layer.

    Looks at rows one by one only where some are wrong: a report may have millions of experts.
    """
    wrong = np.zeros(len(reported), np.bool_)
    if reported.min() < 0 or reported.max() >= experts:
        wrong |= ((reported < 0) | (reported >= experts)).any((1, 2))
    chosen = np.moveaxis(reported, 2, 0).copy()
    for shift in range(1, len(chosen) // 2 + 1):
        twice = chosen == np.roll(chosen, shift, axis=0)
        if twice.any():
            wrong |= twice.any((0, 2))
    return wrong
