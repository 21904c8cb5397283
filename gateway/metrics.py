"""The gateway's Prometheus metrics, in a registry of their own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """Counters that are touched once per call, never per token."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.calls = Counter(
            "headgate_calls", "Calls by API and how they ended", ["api", "finish"], registry=self.registry
        )
        self.prompt_tokens = Counter("headgate_prompt_tokens", "Tokens of prompts", registry=self.registry)
        self.sampled_tokens = Counter(
            "headgate_sampled_tokens", "Tokens sampled and recorded", registry=self.registry
        )
        self.errors = Counter(
            "headgate_errors", "Refusals by status and code", ["status", "code"], registry=self.registry
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
        self.open_episodes = Gauge("headgate_open_episodes", "Open episodes", registry=self.registry)
        self.waiting_calls = Gauge(
            "headgate_waiting_calls", "Calls that wait for an engine", registry=self.registry
        )
        self.version = Gauge("headgate_version", "The newest live version", registry=self.registry)
        self.updates = Gauge("headgate_updates", "Weight updates since the start", registry=self.registry)
        self.streams_across_updates = Gauge(
            "headgate_streams_across_updates", "Calls carried across an update", registry=self.registry
        )
