"""Examines `[telemetry]`: whether the SDK is installed, and whether the collector takes spans."""

from __future__ import annotations

from gateway.doctor.finding import Finding
from gateway.settings import ConfigError, Settings
from gateway.telemetry.opening import collector_answers


async def examine(settings: Settings) -> list[Finding]:
    """Sends the collector no spans, in the form in which it would get some."""
    endpoint = settings.telemetry.endpoint
    if endpoint is None:
        return [Finding("ok", "off: [telemetry] endpoint turns it on")]
    try:
        answers = await collector_answers(settings.telemetry)
    except ConfigError as error:
        return [Finding("problem", str(error), "install the extra, or leave [telemetry] endpoint out")]
    if answers:
        return [Finding("ok", f"the collector at {endpoint} takes spans")]
    what = f"[telemetry] endpoint: {endpoint} accepts no spans"
    return [
        Finding("warning", what, "start a collector there with OTLP over HTTP, or mend the URL and its key")
    ]
