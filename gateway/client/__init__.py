"""The gateway from outside: its admin API (`admin`), and a driver that runs any agent once per episode (`driver`)."""

from gateway.client.admin import GatewayClient, GatewayRefused
from gateway.client.agents import Agent, AgentCrashed, Task, load_agent
from gateway.client.driver import EpisodeRunner
from gateway.client.failures import RunStopped
from gateway.client.outcomes import EpisodeOutcome
from gateway.client.retry import GatewayUnreachable

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
