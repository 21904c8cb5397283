"""A run's timeline from its recording (`scheduler.reactor.recording`) and what its trainers wrote down (`metrics.jsonl`).

Owns the one order in which all of it happened; what it means is in `nodes.py`. The trainer's clock and the recording's are both
the machine's; between machines they are as far apart as those clocks are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from scheduler.reactor.recording import Decision, Event, Run, objects
from scheduler.timeline.intervals import Kind, Step, Timeline
from scheduler.timeline.nodes import Moment, Nodes

_NS = 1e9
_APART_S = 0.005
"""Two blocks of a trainer's work that are nearer belong together."""
_BLOCKS: dict[str, Kind] = {"idle": "idle", "publish": "switching", "claim": "switching"}
"""The state that a trainer's block counts as; any other block is training."""


class BadMetrics(Exception):
    """A file that no trainer wrote."""


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a trainer's work, in seconds since 1970."""

    kind: Kind
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Written:
    """The record of one trainer, in order."""

    blocks: tuple[Block, ...] = ()
    steps: tuple[Step, ...] = ()
    """The time in seconds since 1970."""


def read_metrics(path: Path) -> Written:
    """A trainer's `metrics.jsonl`. Raises BadMetrics, or OSError."""
    blocks, steps = [], {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
            if "eval/versions" in record:  # an evaluation's, beside the steps
                continue
            spans = record.get("spans", [])
            blocks += [
                Block(_BLOCKS.get(name, "train"), float(start), float(end)) for name, start, end in spans
            ]
            steps[int(record["buffer"])] = Step(int(record["buffer"]), float(record["time"]))
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise BadMetrics(f"{path}: line {number} is no record of a trainer: {error!r}") from error
    return Written(tuple(sorted(blocks, key=lambda block: block.start)), tuple(steps.values()))


def timeline_of(
    runs: Sequence[Run], written: Mapping[str, Written] | None = None, model: str | None = None
) -> Timeline:
    """The timeline of a recording's runs, one after the other.

    `written`: of models, what their trainers wrote down. `model`: whose batches are the steps; the one that was trained most, if
    none is named. Raises ValueError.
    """
    written = dict(written or {})
    slugs = slugs_of(runs)
    if unknown := sorted({*written, *([model] if model else [])} - slugs.keys()):
        raise ValueError(f"the recording has no model {', '.join(unknown)}; it has {', '.join(slugs)}")
    moments = sorted([*_recorded(runs, slugs), *_worked(written)], key=lambda moment: moment.at)
    if moments[-1].at <= moments[0].at:
        raise ValueError("the recording has no time in it: nothing happened after its start")
    nodes = Nodes.of(moments, frozenset(name for name, one in written.items() if one.blocks))
    for moment in moments:
        nodes.take(moment)
    for name, one in written.items():
        nodes.trained(name, one.steps)
    return nodes.timeline(moments[0].at, moments[-1].at, model)


def slugs_of(runs: Sequence[Run]) -> dict[str, str]:
    """The models of a recording, and what the names of their reactors end with (as `scheduler.program` makes them)."""
    names = [name for run in runs for name in run.header.settings.get("models", {})]
    found: dict[str, str] = {}
    for name in dict.fromkeys(names):
        slug = re.sub(r"\W", "_", name)
        while slug in found.values():
            slug += "_"
        found[name] = slug
    return found


def _recorded(runs: Sequence[Run], slugs: Mapping[str, str]) -> Iterator[Moment]:
    """Every value that was told or decided, by itself."""
    models, batches = {slug: name for name, slug in slugs.items()}, _Batches()
    for run in runs:
        yield Moment(run.header.start / _NS, {})
        for entry in run.entries:
            at = entry.tag.time / _NS
            if not isinstance(entry, Event | Decision):
                yield Moment(at, {})
                continue
            source = entry.action if isinstance(entry, Event) else entry.port
            model = models.get(source.rpartition(".")[0].partition("_")[2])
            for value in objects(entry) or [{}]:
                yield Moment(at, value, model)
                if value.get("type") == "Filling":
                    yield from batches.changed(at, value)
        yield Moment(run.last.time / _NS, {"type": "Stops"})


class _Batches:
    """Each model's last `Filling`. Tells what changed as the ledger's events, which older recordings have themselves."""

    def __init__(self) -> None:
        self._before: dict[str, dict[str, Any]] = {}

    def changed(self, at: float, filling: dict[str, Any]) -> Iterator[Moment]:
        """A batch was trained, leased, or is whole since the model's last `Filling`. The first one says how things were."""
        if "leased" not in filling:
            return
        model = filling["model"]
        before = self._before.get(model, {"trained": filling["trained"], "leased": -1, "whole": -1})
        whole = filling["buffer"] if filling["groups"] >= filling["size"] > 0 else before["whole"]
        self._before[model] = {**filling, "whole": whole}
        now = (
            ("Consume", filling["trained"], before["trained"]),
            ("Leased", filling["leased"], before["leased"]),
            ("BufferReady", whole, before["whole"]),
        )
        for kind, buffer, last in now:
            if buffer > last:
                yield Moment(at, {"type": kind, "buffer": buffer}, model)


def _worked(written: Mapping[str, Written]) -> Iterator[Moment]:
    """The beginning of each block, and its end where nothing follows at once."""
    for model, one in written.items():
        for block, after in pairwise([*one.blocks, None]):
            assert block is not None
            yield Moment(block.start, {"type": "Works", "kind": block.kind}, model)
            if after is None or after.start > block.end + _APART_S:
                yield Moment(block.end, {"type": "Works", "kind": "idle"}, model)
