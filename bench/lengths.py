"""How well rankers say which calls will be the longest: recall of the true longest 20%, predicted before they are learnt from.

Calls are predicted when they begin and learnt when they are over, on a clock of its own: samples of a group begin together, and
the short ones teach first. Recall is over windows of 500 calls: which share of the truly longest 100 was in the predicted top 100
(where lengths or scores are equal, by lot). Three workloads:

- structured: tasks have medians of their own (log-normal between them, `BETWEEN`); the words of the prompt (30 topics) and its
  length tell most of it, a part is hidden; turns differ; a sample varies around its task by `WITHIN`, and so do the turns of an
  episode together. Every task comes up `EPOCHS` times, 8 samples each. `oracle` knows each task's and turn's median.
- none: the same prompts, and lengths that depend on nothing.
- recorded: the calls of a gateway's store, by default the demo's.
"""

from __future__ import annotations

import heapq
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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

WINDOW, SHARE = 500, 0.2
EPOCHS, GROUP, RUNNING, TOPICS = 4, 8, 16, 30
BETWEEN, WITHIN = 1.2, 0.15
"""Of the logarithm of a length: its spread between tasks, and between samples of one task."""
TURNS = (0.0, -0.5, 0.4)
"""What the median of each turn is, beside the task's, as a logarithm."""
MOST = 8192


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
    level: float
    words: list[int]


@dataclass(frozen=True, slots=True)
class _Episode:
    task: _Task
    group: str
    name: str
    shift: float


def synthetic(tasks: int, structure: bool, seed: int = 0) -> Iterator[Event]:
    """Calls of `RUNNING` groups at once, a token a second; the next group begins when one is over."""
    draw, order = random.Random(seed), count()
    topics = [draw.gauss(0, 1) for _ in range(TOPICS)]
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


def _task(name: str, topics: list[float], draw: random.Random) -> _Task:
    topic, size, hidden = draw.randrange(TOPICS), draw.gauss(0, 1), draw.gauss(0, 1)
    words = [
        1000 + 40 * topic + draw.randrange(40) if draw.random() < 0.3 else draw.randrange(1000)
        for _ in range(max(int(math.exp(4.3 + 0.5 * size)), 8))
    ]
    return _Task(name, 5.5 + BETWEEN * (0.8 * topics[topic] + 0.45 * size + 0.25 * hidden), words)


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
    """What a ranking was worth. `early`: over the first third of the windows; `late`: over the others."""

    recall: float | None
    early: float | None = None
    late: float | None = None
    flagged: float | None = None
    """The share of calls that were said to be tails."""
    predict_us: float = 0.0
    learn_us: float = 0.0


def ranked(events: list[Event], ranker: Ranker) -> Outcome:
    """Predicts and learns, in the events' order."""
    scores, lengths, flagged = [], [], 0
    seconds = {True: 0.0, False: 0.0}
    for event in events:
        begun = time.perf_counter()
        if event.begins:
            found = ranker.predict(event.features)
        else:
            ranker.learn(event.features, event.length)
        seconds[event.begins] += time.perf_counter() - begun
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
    third = len(values) // 3
    return Outcome(_mean(values), _mean(values[:third]), _mean(values[third:]))


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _rows(workload: str, events: list[Event], memory: int) -> dict[str, Outcome]:
    begun = [event for event in events if event.begins]
    lengths = [event.length for event in begun]
    outcomes = {
        "learnt": ranked(events, make_ranker("learnt", SHARE, memory)),
        "history": ranked(events, make_ranker("history", SHARE, memory)),
        "prompt length": scored([len(event.features.prompt) for event in begun], lengths),
    }
    if workload != "recorded":
        outcomes["oracle"] = scored([event.oracle for event in begun], lengths)
    return outcomes


def main(
    tasks: Annotated[int, typer.Option(min=1, help="Tasks of the synthetic workloads.")] = 250,
    store: Annotated[Path, typer.Option(help="A gateway's SQLite store.")] = Path("runs/demo/gateway.db"),
    memory: Annotated[int, typer.Option(min=16, help="Tasks that a ranker remembers.")] = 10_000,
    out: Annotated[Path, typer.Option(help="Where the report goes.")] = Path("runs/bench/lengths.json"),
) -> None:
    """Recall of the true longest 20% on three workloads, and what a prediction costs."""
    loads: dict[str, Callable[[], list[Event]]] = {
        "structured": lambda: list(synthetic(tasks, structure=True)),
        "none": lambda: list(synthetic(tasks, structure=False)),
    }
    if store.is_file():
        loads["recorded"] = partial(recorded, store)
    outcomes: dict[str, dict[str, Outcome]] = {}
    with Steps(len(loads)) as steps:
        for name, load in loads.items():
            steps.begin(name)
            outcomes[name] = _rows(name, load(), memory)
    header = ("workload, ranking", "recall", "first third", "later", "flagged", "predict us", "learn us")
    rows = [
        (f"{load}, {name}", *(number(v) for v in (o.recall, o.early, o.late, o.flagged)),
         number(o.predict_us or None), number(o.learn_us or None))
        for load, found in outcomes.items()
        for name, o in found.items()
    ]  # fmt: skip
    note = "" if store.is_file() else f"No recorded calls: {store} is not there (`make demo` makes it)."
    show("Recall of the true longest 20%, windows of 500 calls", header, rows, note)
    learnt = outcomes["structured"]["learnt"]
    report = {
        "bench": "lengths",
        "recall_structured": learnt.recall,
        "recall_structured_later": learnt.late,
        "recall_oracle": outcomes["structured"]["oracle"].recall,
        "recall_history": outcomes["structured"]["history"].recall,
        "recall_none": outcomes["none"]["learnt"].recall,
        "recall_recorded": outcomes["recorded"]["learnt"].recall if "recorded" in outcomes else None,
        "predict_us": learnt.predict_us,
        "learn_us": learnt.learn_us,
        "machine": machine(),
    }
    finish(report, out)


if __name__ == "__main__":
    typer.run(main)
