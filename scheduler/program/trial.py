"""Decides whether a version or the engine that fails with it is at fault (decision 16). Pure; only the fleet uses it.

A published version is on trial until the first engine has opened with it. Until then:
- an engine that fails with it is restarted with it, because reloads can fail where starts do not, and processes are killed by
  chance;
- an engine that fails with it a second time, in a process that was started with it, goes back to the live version; until the
  outcome is known, no other engine begins the update;
- the version is bad once such an engine is open at the live version;
- an engine that also fails with the live version is itself at fault. If all engines do, the trial decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Finding = Literal["engine_at_fault", "restart", "go_back"]
"""The consequence of a failure: the engine is at fault; restart it with the version; restart it with the live version."""


@dataclass(slots=True)
class Trial:
    """The trial of one version, against the one that was live when it was published."""

    version: int
    live: int
    began: int
    """The time at which the trial began, in ns."""
    why: str = ""
    """Why the version is bad, once it is."""
    tried: set[str] = field(default_factory=set)
    """Engines that failed with the version once."""
    failed: dict[str, str] = field(default_factory=dict)
    """Engines that failed with the version once more, and how; without those that turned out to be at fault."""

    @property
    def launch_version(self) -> int:
        """The version that engines are launched with."""
        return self.live if self.failed else self.version

    def record_failure(self, engine: str, reason: str, version: int, started: int) -> Finding:
        """Record that an engine failed at `version`, in a process started with version `started`; return what follows."""
        if version != self.version:
            if version == self.live:
                self.failed.pop(engine, None)
            return "engine_at_fault"
        if started != self.version or engine not in self.tried:
            self.tried.add(engine)
            return "restart"
        self.failed[engine] = reason
        return "go_back"

    def record_open(self, engine: str, version: int) -> bool:
        """Record that an engine is open at `version`; return whether that shows the version on trial to be bad."""
        if version != self.live or engine not in self.failed:
            return False
        self.why = f"{engine}: {self.failed[engine]} (with version {self.live} it works)"
        return True

    def forget(self, engine: str) -> None:
        """Forget an engine that leaves: whether it was at fault will never be known, so its failure does not count."""
        self.failed.pop(engine, None)
