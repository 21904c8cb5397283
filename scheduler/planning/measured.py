"""A profile from a recorded run: what its nodes did, and what is recorded of calls and of engines' speed.

Training's seconds are those of the timeline, divided evenly over nodes: one run does not show how training scales. So is
generation's, unless the recording has engines' coefficients (`SpeedFitted`) and calls: then it is a model times a factor
by which the run's own nodes were slower or faster than the model predicts, because agents think and wait between calls.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from scheduler.planning.beginning import beginning
from scheduler.planning.profile import BadProfile
from scheduler.planning.timeline import Timeline
from scheduler.policies.allocation import AS_MEASURED, Points, Pool, Sampling, Site, Stage
from scheduler.policies.throughput import COEFFICIENTS, EngineModel
from scheduler.reactor.reading import Run
from scheduler.reactor.recording import Decision, Event, objects


@dataclass(slots=True)
class _Call:
    prompt: int
    length: int = 0
    over_s: float = 0.0


def site_of(runs: Sequence[Run], timeline: Timeline, nodes: int | None = None) -> tuple[Site, list[str]]:
    """Return the site that ran it, or one of `nodes` such nodes, and the basis of the plan, in words. Raise BadProfile.

    `timeline`: of the same runs, from the first step to the end of the last.
    """
    steps = max(1, len(timeline.steps))
    by_kind = timeline.by_kind().values()
    rollout, train = (sum(seconds[kind] for seconds in by_kind) / steps for kind in ("rollout", "train"))
    if rollout <= 0 or train <= 0:
        missing = "sampled" if rollout <= 0 else "trained"
        raise BadProfile(f"no node {missing} in this run; give the trainer's metrics.jsonl (--metrics)")
    basis = [f"{steps} steps, each {rollout:.2f} node-seconds of rollout and {train:.2f} of training"]
    sampled_on = sum(seconds["rollout"] > 0 for seconds in by_kind)
    generation: Stage = Points(((1, rollout),))
    if (model := _sampling(runs, timeline, steps, sampled_on)) is not None:
        predicted = model.seconds(sampled_on, AS_MEASURED) * sampled_on
        generation = replace(model, factor=rollout / predicted)
        basis.append(
            f"{model.samples} calls a step, {model.prompt:.0f} + {model.reply:.0f} tokens, the longest {model.longest:.0f};"
            f" measured {rollout / predicted:.2f} times the prediction of the engines' model"
        )
    else:
        basis.append(
            "rollout is divided evenly over nodes: the recording has no calls, or no coefficients of engines"
        )
    basis.append("training is divided evenly over nodes: one run does not show how it scales")
    pool = Pool(nodes or len(timeline.nodes))
    return Site(generation, Points(((1, train),), trains=True), pool), basis


def _sampling(runs: Sequence[Run], timeline: Timeline, steps: int, nodes: int) -> Sampling | None:
    calls, fitted, engines, most = _facts(runs, timeline)
    if not calls or not fitted:
        return None
    coefficients = (statistics.median(f[k] for f in fitted.values()) for k in COEFFICIENTS)
    ends = [timeline.start_s, *(step.end_s for step in timeline.steps)]
    longest = [
        max((c.length - c.prompt for c in calls if start < c.over_s <= end), default=0)
        for start, end in pairwise(ends)
    ]
    return Sampling(
        EngineModel(*coefficients),
        samples=max(1, round(len(calls) / steps)),
        reply=max(1.0, statistics.fmean(call.length - call.prompt for call in calls)),
        longest=statistics.fmean(longest or [0]),
        prompt=statistics.fmean(call.prompt for call in calls),
        engines=max(1, round(engines / nodes)),
        most=max(1, most),
    )


def _facts(
    runs: Sequence[Run], timeline: Timeline
) -> tuple[list[_Call], dict[str, dict[str, Any]], int, int]:
    """Call that were over within the timeline, the last coefficients of each engine, how many engines had calls, and the most
    concurrent calls of one of them."""
    calls: dict[str, _Call] = {}
    fitted: dict[str, dict[str, Any]] = {}
    inside: dict[str, set[str]] = {}
    where: dict[str, str] = {}
    most = 0
    for at, value in _values(runs, timeline.began):
        match value.get("type"):
            case "Demand":
                for left in value["left"]:
                    inside.get(where.pop(left["call"], ""), set()).discard(left["call"])
                    if (call := calls.get(left["call"])) is not None:
                        call.length, call.over_s = left["length"], at
                for arrived in value["arrived"]:
                    calls.setdefault(arrived["call"], _Call(arrived["length"]))
            case "Placed":
                where[value["call"]] = value["engine"]
                inside.setdefault(value["engine"], set()).add(value["call"])
                most = max(most, len(inside[value["engine"]]))
            case "SpeedFitted":
                fitted[value["engine"]] = value["model"]
    over = [
        c for c in calls.values() if timeline.start_s < c.over_s <= timeline.end_s and c.length > c.prompt
    ]
    return over, fitted, len(inside), most


def _values(runs: Sequence[Run], began: float) -> Iterator[tuple[float, dict[str, Any]]]:
    for run in runs:
        for _, value in beginning(run):
            yield run.header.start / 1e9 - began, value
        for entry in run.entries:
            if isinstance(entry, Event | Decision):
                for value in objects(entry):
                    yield entry.tag.time / 1e9 - began, value
