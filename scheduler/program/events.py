"""Events of engines from outside, and the steps that the control program orders. Frozen values with a JSON form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Step = Literal[
    "launch",
    "stop",
    "quarantine",
    "drain",
    "hold",
    "abort",
    "settle",
    "handback",
    "freeze",
    "load",
    "label",
    "resume",
    "probe",
    "open",
    "sleep",
    "wake",
]
"""The steps that can be taken with an engine:

- launch, stop: a process, or a connection to an engine that is there; quarantine: out of use, without another attempt;
- drain: no request gets in, those inside go on elsewhere;
- sleep: no request gets in, those inside go on elsewhere, and then the engine frees its memory; wake: it has its memory and the
  newest weights, and holds no request;
- hold: no request gets in; abort: the engine gives its requests back; settle: the gateway has seen the end of each;
- handback: like abort, but requests whose sampler cannot move stay; freeze: what is inside stays and samples nothing;
- load, label, resume: the new weights, their name, and resuming; probe: only the gateway sends requests;
- open: it is what it should be; what was held back is delivered, and requests get in.
"""


# Events


@dataclass(frozen=True, slots=True)
class Started:
    """The gateway starts, and this version is the newest that was live."""

    version: int


@dataclass(frozen=True, slots=True)
class Added:
    """One more engine is to be launched."""

    engine: str


@dataclass(frozen=True, slots=True)
class Removed:
    """An engine is no longer wanted."""

    engine: str


@dataclass(frozen=True, slots=True)
class EngineLost:
    """An engine died or no longer responds."""

    engine: str
    reason: str


@dataclass(frozen=True, slots=True)
class Published:
    """A version is there, checked and readable."""

    version: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """A step has ended."""

    engine: str
    step: Step
    version: int
    ok: bool = True
    detail: str = ""
    pinned: int = 0
    """After `hold`: requests inside whose sampler cannot move."""
    excused: bool = False
    """After a failure: the engine did not receive the version, which may be fine."""


# Messages between parts of the program


@dataclass(frozen=True, slots=True)
class EngineLaunched:
    """An engine was launched with the weights of a version, which are not confirmed."""

    engine: str
    version: int


@dataclass(frozen=True, slots=True)
class EngineUnavailable:
    """An engine is not there: for good, or until it is launched again."""

    engine: str
    final: bool
    removed: bool = False
    asleep: bool = False
    """It is not needed, and has not failed: it returns as a new one when it is woken."""


@dataclass(frozen=True, slots=True)
class Failed:
    """An engine failed a step, or missed its deadline."""

    engine: str
    reason: str
    version: int = -1
    """The version that may be the reason; -1 if none can be."""


@dataclass(frozen=True, slots=True)
class Target:
    """The version that every engine has to load."""

    version: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judgment on a version on trial (`trial.py`)."""

    version: int
    kind: Literal["doubted", "tried", "bad"]
    """doubted: an engine failed with it and goes back, and no other tries; tried: others do, after all; bad: none ever does."""
    live: int
    """The version that engines go back to."""
    why: str = ""


@dataclass(frozen=True, slots=True)
class StepTimeout:
    """A step's deadline. `serial` identifies the step."""

    engine: str
    step: Step
    serial: int


@dataclass(frozen=True, slots=True)
class Relaunch:
    """Time to launch an engine again, if nothing was decided about it since `serial`."""

    engine: str
    serial: int


# Commands


@dataclass(frozen=True, slots=True)
class StepCommand:
    """A step to begin. The answer is a `StepResult` with the same engine, step and version."""

    engine: str
    step: Step
    version: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """An update has ended: live on at least one engine and under way on none, or failed on all."""

    version: int
    live: bool
    failures: tuple[str, ...] = ()
    bad: str = ""
    """Why the version is bad: engines have left it, and none will try it again."""
