"""Gateways that are wrong in one way each: a proof that does not find them proves nothing.

A mutant is put into the gateway's classes in this process, while the gateway runs in it. Each says what must be found: in every
call in which anything is wrong, that is what is wrong first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from gateway.rollout.engine_steps import EngineSteps
from gateway.rollout.slot import Slot
from gateway.trajectories.recorder import Prompt, Recorder, TurnDetails
from gateway.trajectories.turn import Turn
from tests.proof.checker import Report


@dataclass(frozen=True, slots=True)
class Mutant:
    """One way to be wrong."""

    name: str
    wrong: str
    """The findings that the checker must count."""
    modes: tuple[str, ...]
    """The modes in which it is a fault: where weights change in empty engines alone, every token is of the newest version."""
    put_in: Callable[[], AbstractContextManager[Any]]

    def caught_by(self, report: Report) -> bool:
        """Returns whether the checker named the right fault. (That the gateway itself distrusts a turn, and masks it, is no other
        finding.)"""
        return report.first.keys() - {"masked"} == {self.wrong}


@contextmanager
def _labels_shifted() -> Iterator[None]:
    """Every label is that of the token before."""
    record = Recorder.record

    async def shifted(
        self: Recorder, episode: str, prompt: Prompt, turn: Turn, details: TurnDetails, reply: Any
    ) -> None:
        labels = [replace(span, count=1) for span in turn.spans for _ in range(span.count)]
        turn.spans = [*labels[:1], *labels[:-1]]
        await record(self, episode, prompt, turn, details, reply)

    with mock.patch.object(Recorder, "record", shifted):
        yield


@contextmanager
def _labels_at_arrival() -> Iterator[None]:
    """A token is of the version that was the newest when it came, whatever the engine says of it later.

    What is in the pipe when an engine is held comes after its update, however long that takes.
    """
    append, hold = Turn.append, EngineSteps._hold

    async def late(self: EngineSteps, slot: Slot, weights: Any) -> None:
        slot.hold_output()
        await hold(self, slot, weights)

    def labelled(self: Turn, ids: list[int], logprobs: list[float]) -> None:
        crossed, self._run_versions = self._run_versions, self._run_versions[-1:]
        append(self, ids, logprobs)
        self._run_versions = crossed

    def unheard(self: Turn, account: Any) -> None:
        pass

    with (
        mock.patch.object(EngineSteps, "_hold", late),
        mock.patch.object(Turn, "append", labelled),
        mock.patch.object(Turn, "end_run", unheard),
    ):
        yield


@contextmanager
def _at_the_seam(change: Callable[[list[Any]], list[Any]]) -> Iterator[None]:
    """Changes the first tokens that come after a call went on elsewhere, or under other weights."""
    append, known = Turn.append, set()

    def changed(self: Turn, ids: list[int], logprobs: list[float]) -> None:
        piece = (self.call_id, self._start, len(self._run_versions))
        if ids and piece not in known:
            known.add(piece)
            if self.ids:
                ids, logprobs = change(ids), change(logprobs)
        append(self, ids, logprobs)

    with mock.patch.object(Turn, "append", changed):
        yield


MUTANTS: Sequence[Mutant] = (
    Mutant("labels shifted by one", "wrong_version", ("abort", "keep"), _labels_shifted),
    Mutant("labels at arrival", "wrong_version", ("keep",), _labels_at_arrival),
    Mutant("a token dropped", "lost", ("abort", "keep"), lambda: _at_the_seam(lambda those: those[1:])),
    Mutant(
        "a token doubled", "doubled", ("abort", "keep"), lambda: _at_the_seam(lambda those: those[:1] + those)
    ),
)
