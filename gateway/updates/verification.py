"""Find out whether an engine runs the version that it should, and report it.

First the engine compares what it holds with what was published, bit by bit (`scheduler.policies.proof`); then its
log-probabilities are judged (`scheduler.policies.probe`). Owns the noise that was measured of each engine.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from gateway.config import UpdateSettings
from gateway.engines.base import Engine
from gateway.generation.slot import Slot
from gateway.updates.distribution import Distribution
from gateway.updates.weights_check import Weights
from headgate.errors import EngineError, ProbeFailed
from headgate.types import Probe
from scheduler.policies.probe import ProbeReport, judge
from scheduler.policies.proof import ProofReport

log = logging.getLogger(__name__)

_NO_NUMBERS = ("not JSON compliant", "JSON encodable")
"""Words of Python's JSON errors for NaN and infinity."""
_REMEMBERED = 16
"""Gaps of an engine whose median is its usual gap."""
_OFF = ProofReport("none", why="[update] prove is false")


@dataclass(slots=True)
class UpdateReport:
    """The cost of bringing one engine to one version, and what was found there."""

    engine: str
    version: int
    streams: int = 0
    """Requests that were running or waiting and were carried across."""
    pinned: int = 0
    """The number of these requests that had to stay in the engine."""
    seconds: dict[str, float] = field(default_factory=dict)
    proof: ProofReport | None = None
    probe: ProbeReport | None = None
    failure: str = ""
    """The reason why the engine had to be restarted, if it had to."""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "engine": self.engine,
            "version": self.version,
            "streams": self.streams,
            "pinned": self.pinned,
            "seconds": {step: round(s, 4) for step, s in self.seconds.items()},
            "proof": self.proof.to_json() if self.proof else None,
            "probe": self.probe.to_json() if self.probe else None,
            "failure": self.failure,
        }


class Verifier:
    """The examination of one model's engines."""

    def __init__(self, update: UpdateSettings, distribution: Distribution, slots: Mapping[str, Slot]) -> None:
        if not update.probe:
            log.warning("[update] probe is false: nothing shows what engines sample with after an update")
        self._update = update
        self._distribution = distribution
        self._slots = slots
        self._noise: dict[str, float] = {}
        """The gap (nats) of each engine at the last version that it passed."""
        self._gaps: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))
        """Those of each engine at the last versions that it was proven to hold."""

    async def verify(self, engine: Engine, slot: Slot, weights: Weights, report: UpdateReport) -> None:
        """Prove and probe an engine; what was found is in `report`. Raise ProbeFailed, with what is wrong."""
        report.proof = await self._prove(slot, weights)
        if report.proof.verdict == "failed":
            message = f"{slot.name} does not hold version {weights.version}: {report.proof.why}"
            raise ProbeFailed(message, code="probe_failed")
        if weights.probe is not None and self._update.probe:
            await self._probe(engine, weights, weights.probe, report)

    async def _prove(self, slot: Slot, weights: Weights) -> ProofReport:
        if not self._update.prove:
            return _OFF
        proof = await self._distribution.prove(slot, weights, self._slots.values())
        known = proof.verdict if proof.verdict in ("proven", "failed") else f"{proof.verdict}: {proof.why}"
        if known != slot.proof and proof.verdict in ("none", "partial"):
            log.warning(
                "%s: that it holds a version is judged by its log-probabilities, which cannot distinguish close versions: %s",
                slot.name,
                proof.why,
            )
        slot.record_proof(known)
        return proof

    async def _probe(self, engine: Engine, weights: Weights, probe: Probe, report: UpdateReport) -> None:
        measured = [await _scores(engine, sequence, weights) for sequence in probe.sequences]
        gaps, proven = self._gaps[engine.name], report.proof is not None and report.proof.verdict == "proven"
        found = report.probe = judge(
            [x for row in measured for x in row],
            [x for row in probe.new_logprobs for x in row],
            [x for row in probe.parent_logprobs for x in row],
            tolerance=self._update.probe_tolerance,
            noise=max(probe.noise, self._noise.get(engine.name, 0.0)),
            usual=median(gaps) if gaps else 0.0,
            proven=proven,
        )
        if found.verdict == "failed":
            parent = "unknown" if found.parent_gap is None else f"{found.parent_gap:.4f}"
            raise ProbeFailed(
                f"{engine.name} does not run version {weights.version}: its log-probabilities are {found.gap:.4f}"
                f" nats off ({parent} off its parent's)",
                code="probe_failed",
            )
        if proven:
            gaps.append(found.gap)
        self._noise[engine.name] = min(found.gap, found.gap if found.parent_gap is None else found.parent_gap)


async def _scores(engine: Engine, sequence: Sequence[int], weights: Weights) -> list[float]:
    """Score a sequence. Raise ProbeFailed for NaN and infinity, which servers report as an error of JSON."""
    try:
        found = await engine.score(sequence, weights.adapter)
    except EngineError as error:
        if not any(words in error.message for words in _NO_NUMBERS):
            raise
        found = [math.nan]
    if all(map(math.isfinite, found)):
        return found
    raise ProbeFailed(
        f"with version {weights.version}, {engine.name} computes log-probabilities that are not numbers (NaN or infinite)",
        code="probe_failed",
    )
