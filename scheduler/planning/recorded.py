"""The timeline of a run, from its recording (`scheduler.reactor.recording`) and its trainers' `metrics.jsonl`.

Owns the order of all events; `node_states.py` derives the states. Trainer and recording have the clocks of their machines.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from scheduler.planning.beginning import beginning
from scheduler.planning.node_states import Moment, Nodes
from scheduler.planning.timeline import Kind, Step, Timeline
from scheduler.reactor.reading import Run
from scheduler.reactor.recording import Decision, Event, objects

_NS = 1e9
_APART_S = 0.005
"""Blocks of a trainer's work that are nearer are one."""
_BLOCKS: dict[str, Kind] = {"idle": "idle", "publish": "switching", "claim": "switching"}
"""The state that a trainer's block counts as; any other block is training."""


class BadMetrics(Exception):
    """A file that is not a trainer's metrics."""


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a trainer's work, in seconds since 1970."""

    kind: Kind
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class TrainerRecord:
    """The blocks of work and the steps of one trainer, in order."""

    blocks: tuple[Block, ...] = ()
    steps: tuple[Step, ...] = ()
    """The time in seconds since 1970."""
    figures: tuple[Mapping[str, float], ...] = ()
    """Of each line of a step, as written."""


def read_metrics(path: Path) -> TrainerRecord:
    """Read a trainer's `metrics.jsonl`. Raise BadMetrics or OSError."""
    blocks, steps, figures = [], {}, []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
            if "eval/versions" in record:  # of an evaluation
                continue
            spans = record.get("spans", [])
            blocks += [
                Block(_BLOCKS.get(name, "train"), float(start), float(end)) for name, start, end in spans
            ]
            steps[int(record["batch"])] = Step(int(record["batch"]), float(record["time"]))
            figures.append(record)
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise BadMetrics(f"{path}: line {number} is not a record of a trainer: {error!r}") from error
    blocks.sort(key=lambda block: block.start)
    return TrainerRecord(tuple(blocks), tuple(steps.values()), tuple(figures))


def timeline_of(runs: Sequence[Run], records: Mapping[str, TrainerRecord] | None = None) -> Timeline:
    """Return the timeline of a recording's runs, one after the other. Raise ValueError.

    `records`: by model. The steps are those of the model with the most.
    """
    records = dict(records or {})
    slugs = slugs_of(runs)
    if unknown := sorted(records.keys() - slugs.keys()):
        raise ValueError(f"the recording has no model {', '.join(unknown)}; it has {', '.join(slugs)}")
    moments = sorted([*_recorded(runs, slugs), *_worked(records)], key=lambda moment: moment.at)
    if moments[-1].at <= moments[0].at:
        raise ValueError("the recording has no time in it: nothing happened after its start")
    nodes = Nodes.of(moments, frozenset(name for name, one in records.items() if one.blocks))
    for moment in moments:
        nodes.apply(moment)
    for name, one in records.items():
        nodes.add_steps(name, one.steps)
    return nodes.timeline(moments[0].at, moments[-1].at)


def slugs_of(runs: Sequence[Run]) -> dict[str, str]:
    """Return the suffix of the reactors' names by model, as `scheduler.program` makes them."""
    names = [name for run in runs for name in run.header.settings.get("models", {})]
    found: dict[str, str] = {}
    for name in dict.fromkeys(names):
        slug = re.sub(r"\W", "_", name)
        while slug in found.values():
            slug += "_"
        found[name] = slug
    return found


def _recorded(runs: Sequence[Run], slugs: Mapping[str, str]) -> Iterator[Moment]:
    """Return each input and decision as a moment of its own."""
    models, batches = {slug: name for name, slug in slugs.items()}, _Batches()
    for run, following in pairwise([*runs, None]):
        assert run is not None
        yield Moment(run.header.start / _NS, {})
        for model, value in beginning(run):
            yield Moment(run.header.start / _NS, value, model)
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
        if following is None or following.header.state is None:
            yield Moment(run.last.time / _NS, {"type": "Stops"})


class _Batches:
    """The last `Filling` of each model, to derive the ledger's events from its changes."""

    def __init__(self) -> None:
        self._before: dict[str, dict[str, Any]] = {}

    def changed(self, at: float, filling: dict[str, Any]) -> Iterator[Moment]:
        """Return the events since the model's last `Filling`: trained, leased, complete. The first one is the state before."""
        if "leased" not in filling:
            return
        model = filling["model"]
        before = self._before.get(model, {"trained": filling["trained"], "leased": -1, "whole": -1})
        whole = filling["batch"] if filling["groups"] >= filling["size"] > 0 else before["whole"]
        self._before[model] = {**filling, "whole": whole}
        now = (
            ("Consume", filling["trained"], before["trained"]),
            ("Leased", filling["leased"], before["leased"]),
            ("BatchReady", whole, before["whole"]),
        )
        for kind, batch, last in now:
            if batch > last:
                yield Moment(at, {"type": kind, "batch": batch}, model)


def _worked(records: Mapping[str, TrainerRecord]) -> Iterator[Moment]:
    """Return the start of each block, and its end unless another follows immediately."""
    for model, one in records.items():
        for block, after in pairwise([*one.blocks, None]):
            assert block is not None
            yield Moment(block.start, {"type": "Works", "kind": block.kind}, model)
            if after is None or after.start > block.end + _APART_S:
                yield Moment(block.end, {"type": "Works", "kind": "idle"}, model)
