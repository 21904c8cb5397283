"""The gateway from outside: its admin API (`GatewayClient`), a driver that runs any agent once per episode (`EpisodeRunner`), and
the feed for trainers of any kind (`Feed`).

It needs neither PyTorch nor a database nor the server's libraries. Names that are exported here are public.
"""

from headgate.client.admin import GatewayClient, GatewayRefused
from headgate.client.agents import (
    Agent,
    AgentCrashed,
    Task,
    load_agent,
)
from headgate.client.driver import EpisodeRunner
from headgate.client.failures import RunStopped
from headgate.client.feed import Batch, Feed, LeaseLost, VersionRefused
from headgate.client.outcomes import EpisodeOutcome
from headgate.client.refusal import OldGateway
from headgate.client.retry import GatewayUnreachable
from headgate.client.rows import Row, rows_of
from headgate.client.versions import write_version

__all__ = [
    "Agent",
    "AgentCrashed",
    "Batch",
    "EpisodeOutcome",
    "EpisodeRunner",
    "Feed",
    "GatewayClient",
    "GatewayRefused",
    "GatewayUnreachable",
    "LeaseLost",
    "OldGateway",
    "Row",
    "RunStopped",
    "Task",
    "VersionRefused",
    "load_agent",
    "rows_of",
    "write_version",
]
