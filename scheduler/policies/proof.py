"""Compares the tensors that an engine's workers have read and hold with those of the published version."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

ProofVerdict = Literal["proven", "partial", "failed", "none"]
Hashes = Mapping[str, Sequence[str]]
"""The hashes of the pieces of each tensor, by its name in the checkpoint."""


@dataclass(frozen=True, slots=True)
class Holding:
    """One worker's comparison of its memory with the tensors of a version that it read."""

    hashes: Hashes
    """The hashes of the bytes that it read."""
    wrong: Mapping[str, str]
    """Tensors whose memory has other numbers, with the place."""
    missing: Collection[str] = ()
    """Tensors that the worker keeps in a form in which they cannot be compared."""


@dataclass(frozen=True, slots=True)
class ProofReport:
    """The result of a proof."""

    verdict: ProofVerdict
    """`proven`: every tensor is held, bit by bit. `partial`: those that can be compared are. `failed`: one is not. `none`: the
    engine cannot compare."""
    tensors: int = 0
    """The tensors of the version."""
    compared: int = 0
    """The tensors that were compared in memory."""
    why: str = ""
    """What is wrong, or why nothing could be compared."""

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def weigh(
    holdings: Sequence[Holding], published: Hashes | None, unchanged: Collection[str] = ()
) -> ProofReport:
    """Return the verdict over all workers of one engine.

    `published`: the hashes in the manifest of the version, None if it has none. `unchanged`: tensors that the version may leave
    out. A tensor counts as compared if one worker found it, since workers may hold different layers.
    """
    if not holdings:
        return ProofReport("none", why="the engine has no worker that compares")
    names = set(holdings[0].hashes) if published is None else set(published)
    wrong = [f"tensor {name!r}: {why}" for holding in holdings for name, why in holding.wrong.items()]
    if published is not None:
        wrong += [line for holding in holdings for line in _misread(holding.hashes, published, unchanged)]
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        return ProofReport("failed", len(names), why=f"{wrong[0]}{more}")
    missing = set.intersection(*(set(holding.missing) for holding in holdings))
    if missing:
        why = f"the engine keeps {len(missing)} of {len(names)} tensors in another form, such as {min(missing)!r}"
        return ProofReport("partial", len(names), len(names) - len(missing), why)
    return ProofReport("proven", len(names), len(names))


def _misread(read: Hashes, published: Hashes, unchanged: Collection[str]) -> list[str]:
    """Return a line for each tensor whose bytes, as a worker read them, are not those of the manifest."""
    lines = []
    for name in sorted(read.keys() | published.keys()):
        if name not in read:
            if name not in unchanged:
                lines.append(f"tensor {name!r}: the engine did not read it")
        elif name not in published:
            lines.append(f"tensor {name!r}: the engine read it, and the manifest does not have it")
        elif list(read[name]) != list(published[name]):
            lines.append(f"tensor {name!r}: the bytes that the engine read are not the manifest's")
    return lines
