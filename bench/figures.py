"""Figures of a measured window, and how those of two ways to the same engine compare. Pure."""

from __future__ import annotations

from bench.load import Shape, Window
from bench.report import Spread, number, percentile

RATES = ("requests_per_s", "chunks_per_s", "tokens_per_s")
LATENCIES = ("first_ms_p50", "first_ms_p99", "request_ms_p50", "request_ms_p99", "token_ms_p50")


def figures(window: Window) -> dict[str, float | None]:
    """Return rates per second, latencies in milliseconds, and CPU-seconds per 1,000 tokens."""
    responses, tokens = window.responses, window.tokens
    counts = (window.requests, window.chunks, tokens)
    found: dict[str, float | None] = {key: n / window.seconds for key, n in zip(RATES, counts, strict=True)}
    for name, values in (
        ("first", [response.first_s for response in responses]),
        ("request", [response.whole_s for response in responses]),
        ("token", [response.whole_s / response.tokens for response in responses if response.tokens]),
    ):
        for percent in (50, 99):
            value = percentile(values, percent)
            found[f"{name}_ms_p{percent}"] = None if value is None else value * 1000
    for name, seconds in window.cpu_s.items():
        found[f"{name}_cpu_s_per_1k_tokens"] = seconds / tokens * 1000 if tokens else None
    return found


def median_of(values: Spread | None) -> str:
    """Format a figure for people."""
    return number(values["median"] if values else None)


def describe(shape: Shape) -> str:
    """Format a figure for people."""
    if not shape.streamed:
        return f"{shape.streams} plain, {shape.max_tokens} tokens"
    return f"{shape.streams} stream{'s' if shape.streams > 1 else ''}"


def ratio(value: float | None, base: float | None) -> float | None:
    """Return value / base; None if one is unknown, or the base 0."""
    return value / base if value is not None and base else None


def difference(value: float | None, base: float | None) -> float | None:
    """Return the difference; None if one is unknown."""
    return value - base if value is not None and base is not None else None
