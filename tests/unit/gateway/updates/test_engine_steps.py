"""Steps of engines: the calls of an engine, and their order."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest

from gateway.config import EngineSettings, ModelSettings, QueueSettings, UpdateSettings, WeightsSettings
from gateway.generation.call import Call
from gateway.generation.peers import NoPeers, Peers
from gateway.generation.pool import EnginePool
from gateway.generation.slot import Run, Slot
from gateway.generation.slot_placer import SlotPlacer
from gateway.updates.distribution import Distribution
from gateway.updates.engine_steps import EngineSteps
from gateway.updates.weights_check import Weights
from headgate.errors import EngineError, NotComparable, ProbeFailed
from headgate.types import Probe, Sampling
from scheduler.policies.proof import Holding
from scheduler.program.events import Step, StepCommand

PROBE = Probe(((1, 2),), ((-0.5,),), ())


class Engine:
    """Record its calls. `scores` is its response to a probe; a pause gives back what runs in `slot`."""

    def __init__(self) -> None:
        self.name = "e"
        self.calls: list[Any] = []
        self.slot = Slot("e", "http://e")
        self.slot.attach(cast(Any, self))
        self.slot.hold()
        self.scores: list[float] | EngineError = []
        self.frees = False
        self.holdings: list[Holding] | NotComparable = NotComparable("e cannot compare")

    async def returns_routes(self) -> bool:
        return False

    async def frees_memory(self) -> bool:
        return self.frees

    async def pause(self, *, keep: bool = False) -> None:
        self.calls.append("pause")
        self.slot.runs.clear()

    async def resume(self) -> None:
        self.calls.append("resume")

    async def load(self, path: str) -> None:
        self.calls.append(path)

    async def label(self, version: int) -> None:
        self.calls.append(version)

    async def wake(self) -> None:
        self.calls.append("wake")

    async def abort(self, request_ids: Sequence[str]) -> None:
        self.calls.append(list(request_ids))
        for name in request_ids:
            del self.slot.runs[name]

    async def close(self) -> None:
        self.calls.append("close")

    async def prove(self, _version: int, _path: str, _adapter: str = "") -> list[Holding]:
        if isinstance(self.holdings, NotComparable):
            raise self.holdings
        return self.holdings

    async def score(self, _ids: Sequence[int], _adapter: str = "") -> list[float]:
        if isinstance(self.scores, EngineError):
            raise self.scores
        return self.scores


def steps_of(
    engine: Engine, peers: Peers | None = None, *, router_replay: bool = False, **settings: Any
) -> EngineSteps:
    """Return the steps of an engine that others have started."""
    pool = EnginePool("demo", QueueSettings())
    pool.slots["e"] = engine.slot
    model = ModelSettings.model_validate({"path": "weights", "router_replay": router_replay})
    external = EngineSettings.model_validate({"launch": "external", "url": "http://e", **settings})
    return EngineSteps(
        pool,
        model,
        external,
        UpdateSettings(),
        peers or NoPeers(),
        Distribution("demo", WeightsSettings(), EngineSettings(), Path("base")),
        check_coordinator=AsyncMock(),
        pinned_s=5.0,
        patient=peers is not None,
    )


async def do(step: Step, engine: Engine, peers: Peers | None = None, **settings: Any) -> None:
    """Do a step for version 3."""
    steps = steps_of(engine, peers, **settings)
    steps.register_version(Weights(3, "version-3", probe=PROBE))
    await steps.run(StepCommand("e", step, 3))


async def test_an_engine_that_reports_no_experts_is_refused_before_anything_is_done_to_it() -> None:
    engine = Engine()
    with pytest.raises(EngineError, match="start it with --enable-return-routed-experts"):
        await do("launch", engine, router_replay=True)
    assert engine.calls == []


def test_a_version_that_an_engine_runs_is_never_forgotten() -> None:
    """However many bad ones come after it, the engine may have to be started with it again."""
    engine = Engine()
    steps, engine.slot.version = steps_of(engine), 3
    for version in range(2, 400):
        steps.register_version(Weights(version, f"version-{version}"))
    assert steps.weights(3) is not None
    assert steps.weights(2) is None
    assert steps.weights(399) is not None


@pytest.mark.parametrize(
    ("sleep", "frees", "first"),
    [
        ("pause", True, "pause"),
        ("level1", False, "wake"),
        ("level2", False, "wake"),
        ("auto", True, "wake"),
        ("auto", False, "pause"),
    ],
)
@pytest.mark.parametrize("step", ["wake", "launch"])
async def test_an_engine_that_wakes_or_is_found_has_the_newest_weights_and_their_label_before_it_samples(
    step: Step, sleep: str, frees: bool, first: str
) -> None:
    engine = Engine()
    engine.frees = frees
    await do(step, engine, sleep=sleep)
    assert engine.calls == [first, "version-3", 3, "resume"]


async def test_a_request_that_arrives_after_the_pause_is_given_back_too() -> None:
    engine = Engine()
    await do("settle", engine)
    assert engine.calls == [], "nothing runs"
    call = Call("late", np.arange(3, dtype=np.int32), Sampling())
    engine.slot.runs["late"] = Run(call, engine.slot, "late", 0.0)
    await do("settle", engine)
    assert engine.calls == ["pause"]


async def test_requests_that_can_move_are_given_back_and_the_others_stay() -> None:
    engine = Engine()
    for name, seed in (("moves", None), ("stays", 1)):
        call = Call(name, np.arange(3, dtype=np.int32), Sampling(seed=seed))
        engine.slot.runs[name] = Run(call, engine.slot, name, 0.0)
    await do("handback", engine)
    assert engine.calls == [["moves"]]
    assert list(engine.slot.runs) == ["stays"]


@pytest.mark.parametrize(
    "scores",
    [[math.nan], [-math.inf], EngineError("Out of range float values are not JSON compliant: nan")],
    ids=["nan", "infinite", "no JSON"],
)
async def test_an_engine_that_computes_no_numbers_does_not_run_the_version(scores: Any) -> None:
    engine = Engine()
    engine.scores = scores
    with pytest.raises(ProbeFailed, match=r"with version 3, e computes .* not numbers") as failed:
        await do("probe", engine)
    assert failed.value.code == "probe_failed"


async def test_a_probe_that_cannot_run_is_not_a_failed_probe() -> None:
    engine = Engine()
    engine.scores = EngineError("it is away")
    with pytest.raises(EngineError, match="it is away") as failed:
        await do("probe", engine)
    assert not isinstance(failed.value, ProbeFailed)


async def test_an_engine_that_fails_the_proof_is_not_probed() -> None:
    engine = Engine()
    engine.holdings = [Holding({"a": ["1"]}, {"a": "it holds other numbers"})]
    with pytest.raises(ProbeFailed, match="e does not hold version 3: tensor 'a': it holds other numbers"):
        await do("probe", engine)
    assert engine.slot.proof == "failed"


async def test_an_engine_that_cannot_compare_is_logged_once_and_probed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Engine()
    engine.scores = [-0.5]
    steps = steps_of(engine)
    steps.register_version(Weights(3, "version-3", probe=PROBE))
    for _ in range(2):
        await steps.run(StepCommand("e", "probe", 3))
    assert engine.slot.describe("demo")["proof"] == "none: e cannot compare"
    assert [
        record.message for record in caplog.records if "judged by its log-probabilities" in record.message
    ] == [
        "e: that it holds a version is judged by its log-probabilities, which cannot distinguish close versions: e cannot compare"
    ]
    engine.holdings = [Holding({"a": ["1"]}, {})]
    await steps.run(StepCommand("e", "probe", 3))
    assert engine.slot.proof == "proven"


class Watching(NoPeers):
    """Other processes, which are shown engines."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def send_slot(self, model: str, slot: Slot) -> Awaitable[None]:
        self.seen.append((model, slot.name, slot.state, slot.version))
        return super().send_slot(model, slot)


async def test_other_processes_are_shown_an_engine_when_it_opens_and_when_it_is_put_to_sleep() -> None:
    peers, engine = Watching(), Engine()
    await do("open", engine, peers)
    await do("sleep", engine, peers)
    assert peers.seen == [("demo", "e", "open", 3), ("demo", "e", "asleep", 3)]


@pytest.mark.parametrize(("step", "state"), [("hold", "held"), ("drain", "draining"), ("wake", "held")])
async def test_the_placer_learns_of_a_closed_engine_before_the_engine_is_called(
    step: Step, state: str
) -> None:
    engine, heard, placer = Engine(), [], Mock(SlotPlacer)
    steps = steps_of(engine)
    engine.slot.mirror_state("open", "", 3, 0)
    steps.register_version(Weights(3, "version-3", probe=PROBE))
    steps._pool.set_placer(placer)
    placer.changed.side_effect = lambda: heard.append((engine.slot.state, [*engine.calls]))
    await steps.run(StepCommand("e", step, 3))
    assert heard[0] == (state, [])


async def test_an_engine_of_others_is_only_left() -> None:
    engine = Engine()
    await do("stop", engine)
    await do("stop", engine)
    assert (engine.calls, engine.slot.engine, engine.slot.restarts) == (["close"], None, 2)
