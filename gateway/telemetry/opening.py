"""Opens the tracing that `[telemetry]` asks for."""

from __future__ import annotations

from gateway.sections import TelemetrySettings
from gateway.settings import ConfigError
from gateway.telemetry.base import NoTracing, Tracing


def open_tracing(settings: TelemetrySettings, process: str) -> Tracing:
    """Tracing, or what stands in for it without an endpoint. Raises ConfigError if the SDK is not installed."""
    if settings.endpoint is None:
        return NoTracing()
    try:
        from gateway.telemetry.otel import OpenTelemetry
    except ImportError as error:
        message = f"[telemetry] endpoint needs OpenTelemetry's SDK: pip install 'headgate[otel]' ({error})"
        raise ConfigError(message) from error
    return OpenTelemetry(settings.endpoint, settings, process)
