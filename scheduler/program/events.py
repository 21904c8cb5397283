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

- launch, stop: a process, or a connection to an engine that is there; quarantine: out of use, and nobody tries again;
- drain: no request gets in, those inside go on elsewhere;
- sleep: no request gets in, those inside go on elsewhere, and then the engine frees its memory; wake: it has its memory and the
  newest weights, and holds no request;
- hold: no request gets in; abort: the engine gives its requests back; settle: the gateway has seen the end of each;
- handback: like abort, but requests whose sampler cannot move stay; freeze: what is inside stays and samples nothing;
- load, label, resume: the new weights, their name, and go; probe: only the gateway asks, and holds back what frozen requests say;
- open: it is what it should be; what was held back is delivered, and requests get in.
"""


# Events


@dataclass(frozen=True, slots=True)
class Begun:
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
class Lost:
    """An engine died, does not answer, or says nothing any more."""

    engine: str
    reason: str


@dataclass(frozen=True, slots=True)
class Published:
    """A version is there, checked and readable."""

    version: int


@dataclass(frozen=True, slots=True)
class Done:
    """A step has ended."""

    engine: str
    step: Step
    version: int
    ok: bool = True
    detail: str = ""
    pinned: int = 0
    """After `hold`: requests inside whose sampler cannot move."""
    excused: bool = False
    """After a failure: the version did not come to the engine, so nothing is known of it."""


# Messages between parts of the program


@dataclass(frozen=True, slots=True)
class Fresh:
    """An engine was launched with the weights of a version, which nobody has confirmed."""

    engine: str
    version: int


@dataclass(frozen=True, slots=True)
class Gone:
    """An engine is not there: for good, or until it is launched again."""

    engine: str
    final: bool
    removed: bool = False
    asleep: bool = False
    """Nobody waits for it, and it has not failed: it comes back, as a fresh one, when it is woken."""


@dataclass(frozen=True, slots=True)
class Failed:
    """An engine failed a step, or missed its deadline."""

    engine: str
    reason: str
    version: int = -1
    """The version that may be the reason; -1 if none can be."""


@dataclass(frozen=True, slots=True)
class Target:
    """The version that every engine shall come to."""

    version: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judgement on a version on trial (`trial.py`)."""

    version: int
    kind: Literal["doubted", "tried", "bad"]
    """doubted: an engine failed with it and goes back, and no other tries; tried: others do, after all; bad: none ever does."""
    live: int
    """The version that engines go back to."""
    why: str = ""


@dataclass(frozen=True, slots=True)
class StepTimeout:
    """A step's deadline. `serial` says which step it was."""

    engine: str
    step: Step
    serial: int


@dataclass(frozen=True, slots=True)
class Again:
    """Time to launch an engine again, if nothing was decided about it since `serial`."""

    engine: str
    serial: int


# Commands


@dataclass(frozen=True, slots=True)
class Do:
    """A step to begin. The answer is a `Done` with the same engine, step and version."""

    engine: str
    step: Step
    version: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Ended:
    """An update has ended: live on at least one engine and under way on none, or failed on all."""

    version: int
    live: bool
    failures: tuple[str, ...] = ()
    bad: str = ""
    """Why the version is bad: engines have left it, and none will try it again."""
