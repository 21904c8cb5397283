"""Measures how well rankers predict the longest calls: recall of the true longest 20%, predicted before they are learnt from.

Calls are predicted when they begin and learnt when they are over, on a clock of its own: samples of a group begin together, and
the short ones teach first. Recall is over windows of 500 calls: which share of the truly longest 100 was in the predicted top 100
(where lengths or scores are equal, by lot). It is told from the first call on, of which nothing is known, and after `WARM` calls,
as many as a gateway reads from its store when it starts. Workloads:

- structured: tasks have medians of their own (log-normal between them, `BETWEEN`); the words of the prompt (30 topics) and its
  length tell most of it, a part is hidden; turns differ; a sample varies around its task by `WITHIN`, and so do the turns of an
  episode together. Every task comes up `EPOCHS` times, 8 samples each. `oracle` knows each task's and turn's median.
- unseen: first turns of as many other tasks (of the same topics), after the structured workload; nothing is learnt from these.
  `oracle` knows what the words and the length of a prompt tell, and not the part that is hidden. Prompts that were not trained on
  are how StreamRL's ranker, which is trained before, is judged, as far as accounts of the paper say.
- none: the same prompts, and lengths that depend on nothing.
- recorded: the calls of gateways' stores, by default the demo's and those of the demo with tools.

The made-up workloads are drawn anew for each seed, from `FIRST_SEED` on: nothing was tried on these while rankers were written
(that was done on seeds 0 and 100 to 103). Means over seeds, with the least and the most.
"""

from __future__ import annotations

import heapq
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from sqlalchemy import Connection, create_engine, select

from bench.report import Steps, finish, machine, number, show
from gateway.control.lengths import past_calls
from gateway.store.lengths import newest_episodes
from gateway.store.models import CallRow, EpisodeRow
from scheduler.lengths import Features, Ranker, make_ranker
from scheduler.lengths.recall import tail_recall

WINDOW, SHARE, WARM = 500, 0.2, 2000
EPOCHS, GROUP, RUNNING, TOPICS = 4, 8, 16, 30
BETWEEN, WITHIN = 1.2, 0.15
"""Standard deviations of the logarithm of a length: between tasks, and between samples of one task."""
TURNS = (0.0, -0.5, 0.4)
"""The median of each turn less the task's, as logarithms."""
MOST = 8192
FIRST_SEED = 8001
STORES = {"demo": Path("runs/demo/gateway.db"), "tools demo": Path("runs/tools-demo/gateway.db")}


@dataclass(frozen=True, slots=True)
class Event:
    """A call begins, or (`begins` is false) is over."""

    begins: bool
    features: Features
    length: int
    oracle: float
    """The logarithm of its median, if anybody knows."""


@dataclass(frozen=True, slots=True)
class _Task:
    name: str
    told: float
    """The part of the median's logarithm that the prompt shows."""
    level: float
    """The logarithm of the median."""
    words: list[int]


@dataclass(frozen=True, slots=True)
class _Episode:
    task: _Task
    group: str
    name: str
    shift: float


def synthetic(tasks: int, structure: bool, seed: int) -> Iterator[Event]:
    """Calls of `RUNNING` groups at once, a token a second; the next group begins when one is over."""
    draw, order = random.Random(seed), count()
    topics = _topics(draw)
    made = [_task(f"task-{i}", topics, draw) for i in range(tasks)]
    groups = iter([task for _ in range(EPOCHS) for task in draw.sample(made, tasks)])
    left: dict[str, int] = {}
    events: list[tuple[float, int, _Episode, int, Event | None]] = []

    def start(now: float) -> None:
        if (task := next(groups, None)) is None:
            return
        group = f"group-{next(order)}"
        left[group] = GROUP
        for i in range(GROUP):
            episode = _Episode(task, group, f"{group}-{i}", draw.gauss(0, 0.5 * WITHIN))
            heapq.heappush(events, (now, next(order), episode, 0, None))

    for _ in range(RUNNING):
        start(0.0)
    while events:
        now, _, episode, turn, over = heapq.heappop(events)
        if over is None:
            begun = _call(episode, turn, structure, draw)
            yield begun
            over = Event(False, begun.features, begun.length, begun.oracle)
            heapq.heappush(events, (now + begun.length, next(order), episode, turn, over))
            continue
        yield over
        if turn + 1 < len(TURNS):
            heapq.heappush(events, (now + 50, next(order), episode, turn + 1, None))
            continue
        left[episode.group] -= 1
        if not left[episode.group]:
            start(now)


def unseen(tasks: int, seed: int) -> Iterator[Event]:
    """First turns of tasks that are not in `synthetic`, but of its topics; they begin, and that is all."""
    topics, draw = _topics(random.Random(seed)), random.Random(f"unseen-{seed}")
    for place in range(tasks):
        task = _task(f"unseen-{place}", topics, draw)
        for i in range(GROUP):
            group = f"{task.name}-group"
            episode = _Episode(task, group, f"{group}-{i}", draw.gauss(0, 0.5 * WITHIN))
            yield replace(_call(episode, 0, True, draw), oracle=task.told)


def _topics(draw: random.Random) -> list[float]:
    return [draw.gauss(0, 1) for _ in range(TOPICS)]


def _task(name: str, topics: list[float], draw: random.Random) -> _Task:
    topic, size, hidden = draw.randrange(TOPICS), draw.gauss(0, 1), draw.gauss(0, 1)
    words = [
        1000 + 40 * topic + draw.randrange(40) if draw.random() < 0.3 else draw.randrange(1000)
        for _ in range(max(int(math.exp(4.3 + 0.5 * size)), 8))
    ]
    told = 5.5 + BETWEEN * (0.8 * topics[topic] + 0.45 * size)
    return _Task(name, told, told + BETWEEN * 0.25 * hidden, words)


def _call(episode: _Episode, turn: int, structure: bool, draw: random.Random) -> Event:
    task = episode.task
    level = task.level + TURNS[turn] if structure else 5.5
    noise = episode.shift + draw.gauss(0, 0.87 * WITHIN) if structure else draw.gauss(0, BETWEEN)
    prompt = np.asarray(task.words + [draw.randrange(1000) for _ in range(20 * turn)], np.int32)
    name = f"{episode.name}-{turn}"
    features = Features(name, task.name, episode.group, episode.name, turn, prompt, 1 + 2 * turn, 0, MOST)
    return Event(True, features, min(max(int(math.exp(level + noise)), 1), MOST), level)


def recorded(path: Path) -> list[Event]:
    """The calls of a store, at the times at which they began and were over."""
    engine = create_engine(f"sqlite:///file:{path}?mode=ro&uri=true")
    try:
        with engine.connect() as connection:
            return [event for _, _, event in sorted(_recorded(connection), key=lambda e: e[:2])]
    finally:
        engine.dispose()


def _recorded(connection: Connection) -> Iterator[tuple[float, int, Event]]:
    times = {
        row.id: row for row in connection.execute(select(CallRow.id, CallRow.received_at, CallRow.seconds))
    }
    for model in connection.scalars(select(EpisodeRow.model).distinct()).all():
        episodes = newest_episodes(connection, model, 1_000_000)
        for features, length in past_calls(connection, model, episodes):
            at = times[features.call]
            yield at.received_at, 0, Event(True, features, length, 0.0)
            yield at.received_at + at.seconds, 1, Event(False, features, length, 0.0)


@dataclass(slots=True)
class Outcome:
    """The recall of one ranking."""

    recall: float | None
    """The recall from the first call on."""
    warm: float | None = None
    """The recall after `WARM` calls."""
    curve: list[float] = field(default_factory=list)
    """The recall of each `WARM` calls."""
    flagged: float | None = None
    """The share of calls that were said to be tails."""
    predict_us: float = 0.0
    """Microseconds of CPU to predict a call."""
    learn_us: float = 0.0
    """Microseconds of CPU to learn from a call, the fits included."""


def ranked(events: list[Event], ranker: Ranker) -> Outcome:
    """Predicts and learns, in the events' order."""
    scores, lengths, flagged = [], [], 0
    seconds = {True: 0.0, False: 0.0}
    for event in events:
        begun = time.process_time()
        if event.begins:
            found = ranker.predict(event.features)
        else:
            ranker.learn(event.features, event.length)
        seconds[event.begins] += time.process_time() - begun
        if event.begins:
            scores.append(found.expected)
            lengths.append(event.length)
            flagged += found.tail
    outcome, calls = scored(scores, lengths), len(scores)
    outcome.flagged = flagged / calls
    outcome.predict_us, outcome.learn_us = 1e6 * seconds[True] / calls, 1e6 * seconds[False] / calls
    return outcome


def scored(scores: list[float], lengths: list[int]) -> Outcome:
    """The mean over whole windows; of less than one window, over what there is."""
    size = min(WINDOW, len(lengths))
    starts = range(0, len(lengths) - size + 1, size or 1)
    found = [tail_recall(scores[s : s + size], lengths[s : s + size], SHARE) for s in starts]
    values = [value for value in found if value is not None]
    step = WARM // WINDOW
    parts = [values[i : i + step] for i in range(0, len(values) - step + 1, step)]
    return Outcome(_mean(values), _mean(values[step:]), [sum(part) / step for part in parts])


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


@dataclass(frozen=True, slots=True)
class Load:
    """A workload, drawn once for each seed; or recorded, and then once."""

    draws: tuple[Callable[[], dict[str, list[Event]]], ...]
    """The events that rankers are shown, one part after the other."""
    made_up: bool = True


def _outcomes(load: Load, memory: int) -> Iterator[dict[str, dict[str, Outcome]]]:
    """The recall of each ranking, by draw and by part of the draw."""
    for draw in load.draws:
        rankers = {name: make_ranker(name, SHARE, memory) for name in ("boosted", "history")}
        outcomes: dict[str, dict[str, Outcome]] = {}
        for part, events in draw().items():
            begun = [event for event in events if event.begins]
            lengths = [event.length for event in begun]
            found = outcomes[part] = {name: ranked(events, ranker) for name, ranker in rankers.items()}
            found["prompt length"] = scored([len(event.features.prompt) for event in begun], lengths)
            if load.made_up:
                found["oracle"] = scored([event.oracle for event in begun], lengths)
        yield outcomes


def _loads(tasks: int, seeds: int, stores: dict[str, Path]) -> list[Load]:
    def structured(seed: int) -> dict[str, list[Event]]:
        return {"structured": list(synthetic(tasks, True, seed)), "unseen": list(unseen(tasks, seed))}

    def none(seed: int) -> dict[str, list[Event]]:
        return {"none": list(synthetic(tasks, False, seed))}

    def store(name: str) -> dict[str, list[Event]]:
        return {name: recorded(stores[name])}

    drawn = range(FIRST_SEED, FIRST_SEED + seeds)
    made_up = [Load(tuple(partial(draw, seed) for seed in drawn)) for draw in (structured, none)]
    return made_up + [Load((partial(store, name),), made_up=False) for name in stores]


class Found:
    """The recall of rankings on a workload, over its draws."""

    def __init__(self, outcomes: list[dict[str, Outcome]]) -> None:
        self.names = list(outcomes[0])
        self._outcomes = outcomes

    def values(self, name: str, figure: str) -> list[float]:
        """One figure of a ranking, of each draw in which it is known."""
        told = (getattr(outcome[name], figure) for outcome in self._outcomes)
        return [value for value in told if value is not None]

    def mean(self, name: str, figure: str = "recall") -> float | None:
        """Over the draws."""
        return _mean(self.values(name, figure))

    def range(self, name: str, figure: str = "recall") -> tuple[float, float] | None:
        """The least and the greatest."""
        values = self.values(name, figure)
        return (min(values), max(values)) if values else None

    def curve(self, name: str) -> list[float]:
        """Recall over each `WARM` calls, the mean over the draws."""
        curves = [outcome[name].curve for outcome in self._outcomes]
        return [sum(some) / len(some) for some in zip(*curves, strict=True)]

    def row(self, load: str, name: str) -> tuple[str, ...]:
        """A row of the table."""
        figures = ("recall", "warm")
        recalls = (part for one in figures for part in (number(self.mean(name, one)), self._shown(name, one)))
        rest = (number(self.mean(name, figure) or None) for figure in ("flagged", "predict_us", "learn_us"))
        return f"{load}, {name}", *recalls, *rest

    def _shown(self, name: str, figure: str) -> str:
        found = self.range(name, figure)
        return "" if found is None or found[0] == found[1] else f"{found[0]:.3f} to {found[1]:.3f}"


def main(
    tasks: Annotated[int, typer.Option(min=1, help="Tasks of the made-up workloads.")] = 250,
    seeds: Annotated[int, typer.Option(min=1, help="How often these are drawn.")] = 5,
    store: Annotated[
        list[Path] | None, typer.Option(help="Gateways' SQLite stores; by default those of both demos.")
    ] = None,
    memory: Annotated[int, typer.Option(min=16, help="Tasks that a ranker remembers.")] = 10_000,
    out: Annotated[Path, typer.Option(help="Where the report goes.")] = Path("runs/bench/lengths.json"),
) -> None:
    """Recall of the true longest 20% on made-up and on recorded calls, and what a prediction costs."""
    wanted = STORES if store is None else {str(path): path for path in store}
    stores = {name: path for name, path in wanted.items() if path.is_file()}
    loads = _loads(tasks, seeds, stores)
    found: dict[str, Found] = {}
    with Steps(len(loads)) as steps:
        for load in loads:
            steps.begin("made up" if load.made_up else "recorded")
            outcomes = list(_outcomes(load, memory))
            found |= {part: Found([one[part] for one in outcomes]) for part in outcomes[0]}
    header = ("workload, ranking", "recall", "range", "warm", "range", "flagged", "predict us", "learn us")
    rows = [one.row(load, name) for load, one in found.items() for name in one.names]
    missing = ", ".join(str(path) for name, path in wanted.items() if name not in stores)
    note = f"Not there: {missing} (`make demo`, `make demo-tools`)." if missing else ""
    title = f"Recall of the true longest 20%, windows of {WINDOW} calls; warm: after {WARM} calls"
    show(title, header, rows, note)
    structured, new = found["structured"], found["unseen"]
    report = {
        "bench": "lengths",
        "seeds": [FIRST_SEED, FIRST_SEED + seeds - 1],
        "recall_structured": structured.mean("boosted"),
        "recall_structured_range": structured.range("boosted"),
        "recall_structured_warm": structured.mean("boosted", "warm"),
        "recall_structured_warm_range": structured.range("boosted", "warm"),
        "recall_structured_curve": structured.curve("boosted"),
        "recall_oracle": structured.mean("oracle"),
        "recall_history": structured.mean("history"),
        "recall_unseen": new.mean("boosted"),
        "recall_unseen_oracle": new.mean("oracle"),
        "recall_none": found["none"].mean("boosted"),
        "recall_recorded": {name: found[name].mean("boosted") for name in stores},
        "predict_us": structured.mean("boosted", "predict_us"),
        "learn_us": structured.mean("boosted", "learn_us"),
        "machine": machine(),
    }
    finish(report, out)


if __name__ == "__main__":
    typer.run(main)
