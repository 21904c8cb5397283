"""One run of the world under the checker's eyes, with a mutant in the gateway or without."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tests.proof.checker import Report, check
from tests.proof.models import build
from tests.proof.mutants import Mutant
from tests.proof.world import Outcome, Plan, play


@dataclass(frozen=True, slots=True)
class Trial:
    """A plan, its outcome, and the checker's report."""

    plan: Plan
    report: Report
    outcome: Outcome
    seconds: float

    @property
    def problems(self) -> list[str]:
        """Why this is no proof; empty: it is one."""
        updates = self.outcome.updates
        found = [str(violation) for violation in self.report.violations]
        found += [f"version {u['version']} is {u['state']}" for u in updates if u["state"] != "live"]
        found += self._too_few_crossings()
        if not self.plan.kill:
            found += [r["failure"] for u in updates for r in u["report"] if r["failure"]]
        if self.plan.kill and not self.outcome.restarts:
            found.append("the engine that was killed was not restarted")
        return [f"{self.plan.name}: {problem}" for problem in found]

    def _too_few_crossings(self) -> list[str]:
        """With `pull` a call may leave for an engine of a third version, so the crossings of all updates are counted together."""
        plan, crossings = self.plan, self.report.crossings
        if plan.order == "pull":
            wanted, there = plan.crossed * plan.updates, crossings.total()
            return [f"{there} calls went on under another version, not {wanted}"] if there < wanted else []
        return [
            f"the update to version {version} was crossed by {crossings[version]} calls, not {plan.crossed}"
            for version in range(1, plan.updates + 1)
            if crossings[version] < plan.crossed
        ]

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return {
            **asdict(self.plan),
            **self.report.to_json(),
            "failures": [r["failure"] for u in self.outcome.updates for r in u["report"] if r["failure"]],
            "restarts": self.outcome.restarts,
            "seconds": round(self.seconds, 1),
        }


def small(plan: Plan) -> Plan:
    """Enough for a mutant to show: few streams; with `keep` much in the pipe."""
    lag_s, tokens = (0.5, 80) if plan.mode == "keep" else (0.0, 60)
    return replace(
        plan,
        engine="fake",
        updates=2,
        streams=4,
        agents=2,
        tokens=tokens,
        crossed=1,
        kill=False,
        lag_s=lag_s,
    )


async def run_trial(plan: Plan, say: Callable[[str], None], mutant: Mutant | None = None) -> Trial:
    """Makes the models, lets it happen, and checks it."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="headgate-proof-") as folder:
        family = build(Path(folder) / "models", plan.engine, plan.updates + 1, plan.transport)
        with mutant.put_in() if mutant else nullcontext():
            outcome = await play(plan, family, Path(folder), say)
    report = check(family.code, outcome.trajectories, outcome.received)
    return Trial(plan, report, outcome, time.monotonic() - started)
