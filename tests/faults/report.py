"""The summaries and tables of every scenario. Judges nothing: it knows the evidence and the checker's findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from bench.report import show
from tests.faults.checker import COUNTS, Report
from tests.faults.evidence import Evidence
from tests.faults.mutants import Mutant

KILLS = ("kill_gateway", "kill_coordinator", "kill_in_update", "kill_engine", "kill_trainer")


def summary(evidence: Evidence, report: Report) -> dict[str, Any]:
    """Return the keys of the last line."""
    plan = evidence.plan
    return {
        "faults": dict(sorted(faults(evidence).items())),
        **{count: report.counts[count] for count in COUNTS},
        "calls": report.facts["finished_replies"],
        "tokens": report.facts["tokens"],
        "seconds": plan["seconds"],
        "seed": plan["seed"],
        "recovery_s": recovery(evidence),
        "facts": dict(sorted(report.facts.items())),
        "findings": dict(report.findings),
    }


def faults(evidence: Evidence) -> Counter[str]:
    """Count the faults by kind."""
    found = Counter(event["fault"] for event in evidence.faults if event["kind"] == "end")
    left = sum(event["kind"] == "end" and event["how"] == "hung_up" for event in evidence.agents)
    return found + Counter({"hang_up": left} if left else {})


def recovery(evidence: Evidence) -> dict[str, dict[str, float]]:
    """Return for each kind of kill the seconds until a later request had a whole reply, until a version was live, and until a
    killed gateway served calls again."""
    sent: dict[tuple[str, int], float] = {}
    whole: list[tuple[float, float]] = []
    for event in evidence.agents:
        if event["kind"] == "ask":
            sent[event["ask"], event["attempt"]] = event["at"]
        elif event["kind"] == "end" and event["how"] == "finished":
            whole.append((sent[event["ask"], event["attempt"]], event["at"]))
    live = sorted(event["at"] for event in evidence.trainer if event["kind"] == "live")
    found: dict[str, dict[str, float]] = {}
    for kind in KILLS:
        kills = [e for e in evidence.faults if e["kind"] == "end" and e["fault"] == kind]
        moments = [kill["since"] for kill in kills]
        replies = [min((end for begin, end in whole if begin > at), default=at) - at for at in moments]
        versions = [next((end for end in live if end > at), at) - at for at in moments]
        if moments:
            ready = _spread("ready", [kill["ready_s"] for kill in kills if "ready_s" in kill])
            found[kind] = {**_spread("reply", replies), **_spread("version", versions), **ready}
    return found


def _spread(name: str, values: list[float]) -> dict[str, float]:
    known = sorted(value for value in values if value > 0)  # none came before the run ended
    if not known:
        return {}
    return {f"{name}_median": round(known[len(known) // 2], 2), f"{name}_max": round(known[-1], 2)}


def show_counts(counts: dict[str, int], kinds: Sequence[str] = COUNTS) -> None:
    """Print the checker's counts."""
    show("Findings", ["", "found"], [(kind.replace("_", " "), str(counts.get(kind, 0))) for kind in kinds])


def show_mutants(trials: Iterable[tuple[Mutant, str, Report]], kinds: Sequence[str] = COUNTS) -> list[str]:
    """Print which mutants were caught; return a problem for each that was not. The second is a mode, or empty."""
    rows, problems = [], []
    for mutant, mode, report in trials:
        caught = mutant.caught_by(report)
        rows.append([mutant.name, mode, "caught" if caught else "NOT CAUGHT"])
        rows[-1] += [str(report.counts[kind]) for kind in kinds]
        problems += [] if caught else [f"not caught: {mutant.name} {mode}".rstrip()]
    if rows:
        show("Mutants", ["", "", "", *(kind.replace("_", " ") for kind in kinds)], rows)
    return problems
