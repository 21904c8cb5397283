"""The tokens that one call samples, and which version sampled each. Pure.

A turn is sampled in runs: one run is one request's stay in one engine. A run begins under one version; weights may change under
it (`cross`), and then nobody but the engine knows which of its tokens came before. So tokens that arrive after a crossing carry
the interval of versions they may have, until the engine's own account at the end of the run says it exactly (`end_run`).

Invariants:
- a token's interval holds every version that can have sampled it, and never narrows but by the engine's account;
- an account is believed only if it names, for every token, a version of its interval; else the whole turn is `disputed`;
- spans cover the tokens exactly, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

Account = Sequence[tuple[str, int]]
"""(label, number of tokens), in order."""


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of equal standing."""

    version: int
    count: int
    newest: int
    """The highest version that may have sampled these tokens; equal to `version` once it is known which one did."""
    stale_kv: bool = False
    """Part of their context was computed by weights before `version`."""

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
    """An engine's account contradicts what was known: no version in this turn is to be trusted."""
    _start: int = 0
    _crossed: list[tuple[int, bool]] = field(default_factory=list)
    """The versions of the present run, and whether what was cached before each was kept."""

    def begin_run(self, version: int) -> None:
        """A run begins in an engine that is known to run `version`."""
        self._start = len(self.ids)
        self._crossed = [(version, False)]

    @property
    def crossed(self) -> bool:
        """True if the weights changed under the present run."""
        return len(self._crossed) > 1

    def cross(self, version: int, stale_kv: bool) -> None:
        """Record that later tokens may be of `version`. `stale_kv`: their context was not recomputed."""
        self._crossed.append((version, stale_kv))

    def append(self, ids: list[int], logprobs: list[float]) -> None:
        """Adds tokens that have just arrived."""
        if ids:
            self.ids += ids
            self.logprobs += logprobs
            newest, stale_kv = self._crossed[-1]
            _extend(self.spans, Span(self._crossed[0][0], len(ids), newest, stale_kv))

    def end_run(self, account: Account | None) -> None:
        """The engine's account of the run; None: it gave none, and what was uncertain stays so."""
        if account is None:
            return
        before, arrived = _split(self.spans, self._start)
        known = {str(version): (version, stale_kv) for version, stale_kv in self._crossed}
        exact = [Span(known[label][0], n, *known[label]) for label, n in account if label in known]
        if len(exact) < len(account) or not _within(exact, arrived):
            self.disputed = True
            return
        for span in exact:
            _extend(before, span)
        self.spans = before

    def truncate(self, count: int) -> None:
        """Forgets what was sampled after the first `count` tokens."""
        del self.ids[count:], self.logprobs[count:]
        self.spans = _split(self.spans, count)[0]

    def restart(self) -> None:
        """Forgets everything: the call is begun anew."""
        self.truncate(0)
        self.disputed = False


def _extend(spans: list[Span], span: Span) -> None:
    """Adds a span, to the last one if it is of equal standing."""
    last = spans[-1] if spans else None
    if last and (last.version, last.newest, last.stale_kv) == (span.version, span.newest, span.stale_kv):
        spans[-1] = replace(last, count=last.count + span.count)
    elif span.count:
        spans.append(span)


def _split(spans: Sequence[Span], count: int) -> tuple[list[Span], list[Span]]:
    """The spans of the first `count` tokens, and of the rest."""
    before: list[Span] = []
    after: list[Span] = []
    for span in spans:
        head = min(max(count, 0), span.count)
        count -= span.count
        _extend(before, replace(span, count=head))
        _extend(after, replace(span, count=span.count - head))
    return before, after


def _within(exact: Sequence[Span], arrived: Sequence[Span]) -> bool:
    """True if every token's exact version lies in the interval with which it arrived, and versions never go back."""
    one = [span.version for span in exact for _ in range(span.count)]
    other = [span for span in arrived for _ in range(span.count)]
    if len(one) != len(other) or one != sorted(one):
        return False
    return all(span.version <= version <= span.newest for version, span in zip(one, other, strict=True))
