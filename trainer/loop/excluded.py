"""Episodes that failed and are left out of training: their share beside the reward, and the bound beyond which a run stops.

Counts the training episodes that ended since the last step, by the gateway's reasons. Pure: no I/O.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from gateway.client.failures import LEAST
from gateway.end_reasons import counted, failed
from trainer.errors import TooManyExcluded


class Excluded:
    """The rewarded and the failed episodes of a run, step by step; `most`: the share of failures that stops it, 1: none does."""

    def __init__(self, most: float) -> None:
        self._most = most
        self._before: Mapping[str, int] | None = None
        self._ended: Counter[str] = Counter()
        """Since the last step."""
        self._unjudged: Counter[str] = Counter()
        """Since the bound was last held against a number of episodes that says something."""

    def look(self, ended: Mapping[str, int]) -> None:
        """Takes the number of ended episodes by reason, of all time. Raises TooManyExcluded."""
        before = ended if self._before is None else self._before
        self._before = dict(ended)
        # Retention may have deleted more than ended.
        new = Counter({reason: max(0, count - before.get(reason, 0)) for reason, count in ended.items()})
        self._ended += counted(new)
        self._unjudged += counted(new)
        if self._unjudged.total() >= LEAST:
            unjudged, self._unjudged = self._unjudged, Counter()
            self._judge(unjudged)

    def figures(self) -> dict[str, float]:
        """The share of episodes that were left out since the last step, and their number by reason; starts the next step."""
        ended, self._ended = self._ended, Counter()
        if not ended:
            return {}
        lost = {reason: float(count) for reason, count in sorted(failed(ended).items())}
        share = sum(lost.values()) / ended.total()
        return {"excluded_share": share, **{f"excluded/{reason}": n for reason, n in lost.items()}}

    def _judge(self, ended: Counter[str]) -> None:
        failures = failed(ended)
        if failures.total() <= self._most * ended.total():
            return
        reasons = ", ".join(f"{count} {reason}" for reason, count in failures.most_common())
        (most, _), *_ = failures.most_common()
        raise TooManyExcluded(
            f"stopped, because {failures.total()} of the last {ended.total()} episodes failed and are left out of training"
            f" ({reasons}), and [run] max_excluded is {self._most:g}; fix the cause, and the next start goes on from the"
            " newest checkpoint",
            most,
        )
