"""Events of engines from outside, and the steps that the control program requests. Frozen values with a JSON form."""

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
"""The steps of an engine:

- launch, stop: start or stop its process, or the connection to an external engine; quarantine: put it out of use, without another
  attempt to stop it;
- drain: accept no request; those in the engine continue in other engines;
- sleep: drain, then free the engine's memory; wake: allocate the memory and load the newest weights;
- hold: accept no request; abort: make the engine give its requests back; settle: wait until the gateway has received the end of
  each;
- handback: as abort, except for requests whose sampler cannot move; freeze: stop sampling, and keep the requests in the engine;
- load, label, resume: load the new weights, set their name, sample again; probe: compare log-probabilities, while only the
  gateway sends requests;
- open: deliver what was held back, and accept requests.
"""


# Events


@dataclass(frozen=True, slots=True)
class Started:
    """The gateway starts, and this version is the newest that was live."""

    version: int


@dataclass(frozen=True, slots=True)
class Added:
    """An engine was added and has to be launched."""

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
class Canary:
    """The trial of a version: only these engines load it. The others run the live version until the trial ends."""

    live: int
    engines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Published:
    """A version is published: checked and readable."""

    version: int
    canary: Canary | None = None
    """None: every engine loads it."""


@dataclass(frozen=True, slots=True)
class TrialEnded:
    """The trial of a version has ended: every engine loads it, or none runs it any longer."""

    version: int
    promoted: bool


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
    """An engine cannot be used: permanently (`final`), or until it is launched again."""

    engine: str
    final: bool
    removed: bool = False
    asleep: bool = False
    """It has not failed: it returns as a new engine when it is woken."""


@dataclass(frozen=True, slots=True)
class Failed:
    """An engine failed a step, or missed its deadline."""

    engine: str
    reason: str
    version: int = -1
    """The version that may be the reason; -1 if none can be."""


@dataclass(frozen=True, slots=True)
class Target:
    """The version that every engine has to load; while it is on trial, those of the trial."""

    version: int
    canary: Canary | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judgment on a version on trial (`trial.py`)."""

    version: int
    kind: Literal["suspected", "cleared", "bad"]
    """suspected: an engine failed with it and goes back, and no other begins the update; cleared: others may begin it; bad:
    no engine ever loads it."""
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
    """The time to restart an engine, if nothing was decided about it since `serial`."""

    engine: str
    serial: int


# Commands


@dataclass(frozen=True, slots=True)
class StepCommand:
    """A step to begin. Its result is a `StepResult` with the same engine, step and version."""

    engine: str
    step: Step
    version: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """An update has ended: the version is live, or all engines failed to load it."""

    version: int
    live: bool
    failures: tuple[str, ...] = ()
    bad: str = ""
    """Why the version is bad; empty if it is not. No engine will load it again."""
