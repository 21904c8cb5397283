"""Every way to be wrong that the checkers must notice: a count that no mutant can raise proves nothing.

A mutant runs in one of four places: `evidence` is changed after the fact; the others are gateways with one wrong function, under
`crashes` in a process of its own (`python -m tests.faults.mutants NAME serve --config FILE`), under `updates` and `seam` in the
process of the scenario. Some run in the virtual cluster too, in a second.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

from tests.faults import spoilt_evidence as evidence
from tests.faults import spoilt_gateways as gateways
from tests.faults.checker import Report


@dataclass(frozen=True, slots=True)
class Mutant:
    """One way to be wrong."""

    runner: Literal["evidence", "crashes", "updates", "seam"]
    name: str
    wrong: tuple[str, ...]
    """The checker must count one of these."""
    spoil: Callable[..., Any]
    """Change the evidence in place; or return the context in which gateways are wrong."""
    modes: tuple[str, ...] = ("abort", "keep")
    """The modes of a weight update in which it is a fault."""
    first: bool = False
    """In every call with a finding, one of `wrong` is the first."""
    virtual: bool = False
    """The virtual cluster catches it too."""

    def caught_by(self, report: Report) -> bool:
        """Return whether the checker named the right fault."""
        if self.first:
            return bool(report.first) and {*report.first.values()} <= {*self.wrong}
        return any(report.counts[count] for count in self.wrong)

    def put_in(self) -> AbstractContextManager[Any]:
        """Make gateways of this process wrong."""
        context: AbstractContextManager[Any] = self.spoil()
        return context


MUTANTS = (
    Mutant("evidence", "a reply is not stored", ("lost",), evidence.reply_not_stored),
    Mutant("evidence", "the last token is not stored", ("lost",), evidence.last_token_not_stored),
    Mutant("evidence", "a whole reply is stored as abandoned", ("lost",), evidence.stored_as_abandoned),
    Mutant("evidence", "a token is lost for all", ("lost",), evidence.token_lost),
    Mutant("evidence", "a reply is shorter than requested", ("lost",), evidence.too_short),
    Mutant("evidence", "a client received another token", ("wrong_reply",), evidence.token_differs),
    Mutant("evidence", "a reply broke off unlike the record", ("wrong_reply",), evidence.breaks_off_unlike_record),
    Mutant("evidence", "a reply broke off unlike the samples", ("wrong_reply",), evidence.breaks_off_unlike_samples),
    Mutant("evidence", "a turn is stored twice", ("doubled",), evidence.turn_twice),
    Mutant("evidence", "a question is answered twice", ("doubled",), evidence.sampled_twice),
    Mutant("evidence", "a token is sampled twice", ("doubled",), evidence.token_twice),
    Mutant("evidence", "another version's label", ("wrong_version",), evidence.other_version),
    Mutant("evidence", "an interval without a flag", ("wrong_version",), evidence.interval_not_flagged),
    Mutant("evidence", "a flag without an interval", ("wrong_version",), evidence.flag_without_interval),
    Mutant("evidence", "an interval without the truth in it", ("wrong_version",), evidence.interval_without_truth),
    Mutant("evidence", "a token that no engine sampled", ("wrong_version",), evidence.sampled_by_no_engine),
    Mutant("evidence", "a group in two batches", ("trained_twice",), evidence.in_two_batches),
    Mutant("evidence", "a group in two checkpoints", ("trained_twice",), evidence.in_two_checkpoints),
    Mutant("evidence", "a batch acknowledged twice", ("trained_twice",), evidence.acknowledged_twice),
    Mutant("evidence", "a batch acknowledged without a group", ("never_trained",), evidence.acknowledged_untrained),
    Mutant("evidence", "a group that the ledger lost", ("never_trained",), evidence.missing_in_ledger),
    Mutant("evidence", "a full batch that was not trained", ("never_trained",), evidence.last_batch_untrained),
    Mutant("evidence", "a reward that was lost", ("never_trained",), evidence.reward_lost),
    Mutant("evidence", "a key that reached another's episode", ("leaks",), evidence.foreign_read),
    Mutant("evidence", "replies that went to each other's clients", ("leaks",), evidence.swapped_replies),
    Mutant("crashes", "last-token-not-recorded", ("lost",), gateways.last_token_not_recorded, virtual=True),
    Mutant("crashes", "other-text", ("wrong_reply",), gateways.other_text),
    Mutant("crashes", "token-twice", ("doubled",), gateways.token_twice, virtual=True),
    Mutant("crashes", "next-version", ("wrong_version",), gateways.next_version, virtual=True),
    Mutant("crashes", "batch-leased-again", ("trained_twice",), gateways.batch_leased_again),
    Mutant("crashes", "group-left-out", ("never_trained",), gateways.group_left_out),
    Mutant("crashes", "any-key", ("leaks",), gateways.any_key),
    Mutant("updates", "labels shifted by one", ("wrong_version",), gateways.labels_shifted, first=True, virtual=True),
    # With `abort` weights change in empty engines alone, so every token is of the newest version.
    Mutant("updates", "labels at arrival", ("wrong_version",), gateways.labels_at_arrival, ("keep",), True, True),
    Mutant("updates", "a token dropped", ("lost",), gateways.seam_token_dropped, first=True, virtual=True),
    Mutant("updates", "a token doubled", ("doubled",), gateways.seam_token_doubled, first=True, virtual=True),
    Mutant("updates", "experts shifted by one", ("wrong_route",), gateways.routes_shifted, first=True),
    Mutant("seam", "a length without its body", ("crossed", "smuggled", "wrong"), gateways.body_dropped),
    Mutant("seam", "keys are not checked", ("unchecked",), gateways.keys_unchecked),
    Mutant("seam", "headers of a connection are copied", ("crossed", "smuggled", "wrong", "lost"), gateways.headers_copied),
)  # fmt: skip


def of(runner: str) -> list[Mutant]:
    """Return the mutants of a runner, or of the `virtual` cluster."""
    return [m for m in MUTANTS if m.runner == runner or (runner == "virtual" and m.virtual)]


def main() -> None:
    """Run a gateway with a mutant."""
    name = sys.argv.pop(1)
    (mutant,) = [mutant for mutant in of("crashes") if mutant.name == name]
    from gateway.cli import main as gateway

    with mutant.put_in():
        gateway()


if __name__ == "__main__":
    main()
