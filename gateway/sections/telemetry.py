"""Traces: `[telemetry]`."""

from __future__ import annotations

from pydantic import Field

from gateway.sections.base import Name
from scheduler.configuration import Section


class TelemetrySettings(Section):
    """`[telemetry]`: spans of calls, sent to an OpenTelemetry collector (docs/telemetry.md). Off without an endpoint."""

    endpoint: str | None = Field(None, pattern="^https?://")
    """The collector's OTLP/HTTP root, such as `http://127.0.0.1:4318`; spans are posted to `/v1/traces` below it. Needs
    `headgate[otel]`. Headers, keys too, come from `OTEL_EXPORTER_OTLP_HEADERS` in the environment."""
    service: Name = "headgate"
    """The name of this service in traces (`service.name`)."""
    share: float = Field(1.0, ge=0, le=1)
    """The share of calls that is traced, of those that come without `traceparent`; with one the caller decides."""
