"""Prometheus counters of a gateway process, in a registry of its own.

`gateway/api/live_metrics.py` has the metrics that are computed when `/metrics` is read.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """Touched once per call or per transaction, never per token."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.calls = Counter(
            "headgate_calls", "Calls by API and how they ended", ["api", "finish"], registry=self.registry
        )
        self.prompt_tokens = Counter("headgate_prompt_tokens", "Tokens of prompts", registry=self.registry)
        self.sampled_tokens = Counter(
            "headgate_sampled_tokens", "Tokens sampled and recorded", registry=self.registry
        )
        self.routes = Counter(
            "headgate_routes",
            "Tokens of recorded turns by what is known of their experts, where `router_replay` is on",
            ["result"],
            registry=self.registry,
        )
        self.errors = Counter(
            "headgate_errors", "Refusals by status and code", ["status", "code"], registry=self.registry
        )
        self.refused_calls = Counter(
            "headgate_refused_calls",
            "Calls of episodes that were refused before anything was sampled, by API and code",
            ["api", "code"],
            registry=self.registry,
        )
        self.dropped_tools = Counter(
            "headgate_dropped_tools",
            "Hosted tools in requests that were left out of the prompt",
            ["type"],
            registry=self.registry,
        )
        self.tool_faults = Counter(
            "headgate_tool_faults",
            "Replies with malformed tool calls, by what is wrong",
            ["fault"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "headgate_call_seconds", "Seconds of a call", buckets=_SECONDS, registry=self.registry
        )
        self.first_token = Histogram(
            "headgate_first_token_seconds",
            "Seconds to the first token",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.commit_seconds = Histogram(
            "headgate_store_commit_seconds",
            "Seconds from the start of a transaction until it is committed",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.commit_writes = Histogram(
            "headgate_store_commit_writes",
            "Writes in one transaction",
            buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256),
            registry=self.registry,
        )
        ProcessCollector(registry=self.registry)

    def committed(self, writes: int, seconds: float) -> None:
        """Count a committed transaction; called from the writer's thread."""
        self.commit_writes.observe(writes)
        self.commit_seconds.observe(seconds)
