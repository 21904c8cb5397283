"""The tokens that one call samples, and which version sampled each. Pure.

A turn is sampled in runs: one run is one request in one engine. A run begins under one version. If the weights change during the
run (`weights_changed`), only the engine knows which tokens it sampled before the change. Tokens that arrive afterwards therefore
carry the interval of versions that may have sampled them, until the engine reports its labels at the end of the run (`end_run`).

Invariants:
- a token's interval holds every version that can have sampled it, and only the engine's labels narrow it;
- labels count only if they name, for every token, a version of its interval; otherwise the whole turn is `disputed`;
- spans cover the tokens exactly, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.trajectories.turn_routes import Reported, TurnRoutes
from headgate.kept import kept_of

LabelCounts = Sequence[tuple[str, int]]
"""Pairs of a version's label and the number of tokens sampled under it, in order."""


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of equal standing."""

    version: int
    count: int
    newest: int
    """The highest version that may have sampled these tokens; equal to `version` once it is known which one did."""

    @property
    def confirmed(self) -> bool:
        """True if the version that sampled the tokens is known exactly."""
        return self.version == self.newest


@dataclass(slots=True)
class Turn:
    """The tokens only grow, until `truncate` ends the turn early or `restart` forgets them all."""

    call_id: str
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    engine: str = ""
    pauses: int = 0
    """The number of times an engine gave the call back."""
    disputed: bool = False
    """An engine's labels contradict what was known: no version in this turn can be trusted."""
    routes: TurnRoutes | None = None
    """The experts that its tokens went through; None: they are not recorded."""
    kept: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """What a truncated distribution left to choose from, by the index of the token, where it is known."""
    _start: int = 0
    _run_versions: list[int] = field(default_factory=list)
    """The versions of the present run."""

    def begin_run(self, version: int) -> None:
        """Start a run in an engine that is known to run `version`."""
        self._start = len(self.ids)
        self._run_versions = [version]
        if self.routes is not None:
            self.routes.begin_run(self._start)

    @property
    def weights_have_changed(self) -> bool:
        """True if the weights changed under the present run."""
        return len(self._run_versions) > 1

    def weights_changed(self, version: int) -> None:
        """Record that later tokens may be of `version`."""
        self._run_versions.append(version)

    def append(self, ids: list[int], logprobs: list[float]) -> None:
        """Add tokens that have just arrived."""
        if ids:
            self.ids += ids
            self.logprobs += logprobs
            _extend(self.spans, self._run_versions[0], len(ids), self._run_versions[-1])

    def keep(self, ids: list[int], alternatives: Sequence[Sequence[tuple[int, float]]]) -> None:
        """Record what a truncated distribution left to choose from for tokens that are appended next."""
        for at, (token, found) in enumerate(zip(ids, alternatives, strict=True), len(self.ids)):
            if kept := kept_of(token, found):
                self.kept[at] = kept

    def end_run(self, labels: LabelCounts | None, routes: Reported | None = None) -> None:
        """Take the engine's labels for the run's tokens; None: it gave none, and intervals stay as they are. `routes`: the rows
        of experts that it reports."""
        if self.routes is not None:
            self.routes.end_run(routes, len(self.ids))
        if labels is None:
            return
        before, arrived = _split(self.spans, self._start)
        known = {str(version): version for version in self._run_versions}
        exact = [Span(known[label], n, known[label]) for label, n in labels if label in known]
        if len(exact) < len(labels) or not _within(exact, arrived):
            self.disputed = True
            return
        for span in exact:
            _extend(before, span.version, span.count, span.newest)
        self.spans = before

    def truncate(self, count: int) -> None:
        """Forget what was sampled after the first `count` tokens."""
        del self.ids[count:], self.logprobs[count:]
        self.spans = _split(self.spans, count)[0]

    def restart(self) -> None:
        """Forget everything, for the call starts again."""
        self.truncate(0)
        self.kept.clear()
        self.disputed = False
        if self.routes is not None:
            self.routes.restart()


def _extend(spans: list[Span], version: int, count: int, newest: int) -> None:
    """Add a span, to the last one if it is of equal standing. Called for every chunk of tokens."""
    last = spans[-1] if spans else None
    if last and last.version == version and last.newest == newest:
        spans[-1] = Span(version, last.count + count, newest)
    elif count:
        spans.append(Span(version, count, newest))


def _split(spans: Sequence[Span], count: int) -> tuple[list[Span], list[Span]]:
    """Return the spans of the first `count` tokens, and of the rest."""
    before: list[Span] = []
    after: list[Span] = []
    for span in spans:
        head = min(max(count, 0), span.count)
        count -= span.count
        _extend(before, span.version, head, span.newest)
        _extend(after, span.version, span.count - head, span.newest)
    return before, after


def _within(exact: Sequence[Span], arrived: Sequence[Span]) -> bool:
    """Return true if every token's exact version lies in the interval with which it arrived, and versions never go back."""
    versions = [span.version for span in exact if span.count]
    if versions != sorted(versions) or _count(exact) != _count(arrived):
        return False
    for span in exact:
        here, arrived = _split(arrived, span.count)
        if not all(interval.version <= span.version <= interval.newest for interval in here):
            return False
    return True


def _count(spans: Sequence[Span]) -> int:
    return sum(span.count for span in spans)
