"""Statements about the steps of trainers, whose figures are the curves of a run.

A run has a trainer's name for it, and a model. A step that is posted again, or whose evaluation comes later, adds its figures to
those that are stored. A run that goes back to an older checkpoint replaces its steps one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, func, select, update

from gateway.store import upsert
from gateway.store.clock import NOW
from gateway.store.events import Event, insert_events
from gateway.store.models import TrainerStepRow

_C = TrainerStepRow.__table__.c


@dataclass(frozen=True, slots=True)
class TrainerStep:
    """A step as a trainer reports it."""

    model: str
    run: str
    step: int
    version: int | None = None
    figures: dict[str, float] = field(default_factory=dict)
    folder: str = ""


@dataclass(slots=True)
class Curves:
    """Steps by column; each figure has a value or None for each step."""

    count: int = 0
    """Stored steps; if there are more than requested, the columns have every `every`-th one."""
    every: int = 1
    step: list[int] = field(default_factory=list)
    version: list[int | None] = field(default_factory=list)
    at: list[float] = field(default_factory=list)
    figures: dict[str, list[float | None]] = field(default_factory=dict)


def store_step(connection: Connection, report: TrainerStep) -> None:
    """Store a step, or add to it, and publish its event: `trainer.evaluated` if all figures are of an evaluation."""
    place = (_C.model == report.model, _C.run == report.run, _C.step == report.step)
    known = connection.execute(select(_C.figures, _C.version, _C.folder).where(*place)).one_or_none()
    if known is None:
        values = {"model": report.model, "run": report.run, "step": report.step, "version": report.version,
                  "figures": report.figures, "folder": report.folder, "at": NOW}  # fmt: skip
        connection.execute(upsert.insert(connection, TrainerStepRow).values(values))
    else:
        version = known.version if report.version is None else report.version
        merged = {**known.figures, **report.figures}
        values = {"figures": merged, "version": version, "folder": report.folder or known.folder}
        connection.execute(update(TrainerStepRow).where(*place).values(values))
    data: dict[str, Any] = {"step": report.step, "version": report.version, "figures": report.figures}
    data = {name: value for name, value in data.items() if value is not None}
    if report.run:
        data["run"] = report.run
    evaluation = bool(report.figures) and all(name.startswith("eval/") for name in report.figures)
    kind = "trainer.evaluated" if evaluation else "trainer.step"
    insert_events(connection, [Event(kind, report.model, data=data)])


def runs(connection: Connection, models: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Return the runs, the last updated one first; `models`: of these alone."""
    query = select(
        _C.run,
        _C.model,
        func.count().label("steps"),
        func.min(_C.step).label("first_step"),
        func.max(_C.step).label("last_step"),
        func.min(_C.at).label("began_at"),
        func.max(_C.at).label("ended_at"),
        func.max(_C.version).label("last_version"),
    ).group_by(_C.model, _C.run)
    if models is not None:
        query = query.where(_C.model.in_(models))
    query = query.order_by(func.max(_C.at).desc(), _C.model, _C.run)
    return [dict(row) for row in connection.execute(query).mappings()]


def curves(
    connection: Connection,
    model: str,
    run: str,
    after: int = -1,
    points: int = 2000,
    figures: Sequence[str] = (),
) -> Curves:
    """Return the named figures of a run's steps after one, or all figures; at most `points` steps, evenly spaced."""
    where = [_C.model == model, _C.run == run, _C.step > after]
    last, count = connection.execute(select(func.max(_C.step), func.count()).where(*where)).one()
    found = Curves(count, max(1, -(-count // points)))
    query = select(_C.step, _C.version, _C.at, _C.figures).where(*where).order_by(_C.step)
    if found.every > 1:
        query = query.where((last - _C.step) % found.every == 0)
    for row in connection.execute(query):
        found.step.append(row.step)
        found.version.append(row.version)
        found.at.append(row.at)
        for name, value in row.figures.items():
            if not figures or name in figures:
                column = found.figures.setdefault(name, [])
                column.extend([None] * (len(found.step) - 1 - len(column)))
                column.append(value)
    for column in found.figures.values():
        column.extend([None] * (len(found.step) - len(column)))
    return found


def newest(
    connection: Connection, model: str, count: int, run: str | None = None
) -> list[tuple[int, dict[str, float]]]:
    """Return the last steps of a run with their figures, in order; without a name of the last updated one."""
    known = [each["run"] for each in runs(connection, (model,)) if run in (None, each["run"])]
    query = select(_C.step, _C.figures).where(_C.model == model, _C.run == next(iter(known), ""))
    rows = connection.execute(query.order_by(_C.step.desc()).limit(count)).all()
    return [(step, figures) for step, figures in reversed(rows)]


def of_version(connection: Connection, model: str, version: int) -> dict[str, Any] | None:
    """Return the newest step that made a version."""
    query = select(*_C).where(_C.model == model, _C.version == version).order_by(_C.at.desc()).limit(1)
    row = connection.execute(query).mappings().first()
    return dict(row) if row else None


def folders(connection: Connection) -> list[str]:
    """Return the folders of the last updated runs, at most 8, the newest first."""
    query = select(_C.folder).where(_C.folder != "").group_by(_C.folder)
    return [*connection.scalars(query.order_by(func.max(_C.at).desc()).limit(8))]
