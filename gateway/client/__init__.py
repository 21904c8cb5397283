"""The gateway from outside: its admin API (`admin`), and a driver that runs any agent once per episode (`driver`)."""

from gateway.client.admin import GatewayClient, GatewayRefused
from gateway.client.agents import Agent, Task, load_agent
from gateway.client.driver import EpisodeOutcome, EpisodeRunner

__all__ = [
    "Agent",
    "EpisodeOutcome",
    "EpisodeRunner",
    "GatewayClient",
    "GatewayRefused",
    "Task",
    "load_agent",
]
