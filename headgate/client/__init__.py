"""The gateway from outside: its admin API (`admin`), and a driver that runs any agent once per episode (`driver`)."""

from headgate.client.admin import GatewayClient, GatewayRefused
from headgate.client.agents import (
    Agent,
    AgentCrashed,
    Task,
    load_agent,
)
from headgate.client.driver import EpisodeRunner
from headgate.client.failures import RunStopped
from headgate.client.outcomes import EpisodeOutcome
from headgate.client.retry import GatewayUnreachable

__all__ = [
    "Agent",
    "AgentCrashed",
    "EpisodeOutcome",
    "EpisodeRunner",
    "GatewayClient",
    "GatewayRefused",
    "GatewayUnreachable",
    "RunStopped",
    "Task",
    "load_agent",
]
