"""The version that a share of the new conversations tries, as calls are placed by it (docs/guide/live.md). Pure."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.policies.canary import drawn


@dataclass(frozen=True, slots=True)
class Trial:
    """A running trial of one model."""

    version: int
    """The candidate."""
    live: int
    """The version that all other conversations have."""
    share: float
    since: float
    """Seconds since the epoch: conversations that were opened before take no part."""
    agents: frozenset[str]
    """The agents in daily use whose conversations are drawn."""

    def includes(self, agent: str, created_at: float) -> bool:
        """Return true if a conversation takes part, with either version."""
        return agent in self.agents and created_at >= self.since

    def tries(self, agent: str, created_at: float, episode_id: str) -> bool:
        """Return true if a conversation gets the candidate, until the trial ends."""
        return self.includes(agent, created_at) and drawn(self.version, episode_id, self.share)
