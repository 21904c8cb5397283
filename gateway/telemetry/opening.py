"""Opens the tracing that `[telemetry]` requests."""

from __future__ import annotations

import asyncio
from types import ModuleType

from gateway.config import TelemetrySettings
from gateway.config.settings import ConfigError
from gateway.telemetry.base import NoTracing, Tracing
from headgate.extras import install_command


def open_tracing(settings: TelemetrySettings, process: str) -> Tracing:
    """Tracing, or what stands in for it without an endpoint. Raise ConfigError if the SDK is not installed."""
    if settings.endpoint is None:
        return NoTracing()
    tracing: Tracing = _otel().OpenTelemetry(settings.endpoint, settings, process)
    return tracing


async def collector_responds(settings: TelemetrySettings) -> bool:
    """Return whether the collector of `[telemetry] endpoint` takes spans. Raise ConfigError if the SDK is not installed."""
    assert settings.endpoint is not None
    return bool(await asyncio.to_thread(_otel().responds, settings.endpoint))


def _otel() -> ModuleType:
    try:
        from gateway.telemetry import otel
    except ImportError as error:
        message = f"[telemetry] endpoint needs OpenTelemetry's SDK: {install_command('otel')} ({error})"
        raise ConfigError(message) from error
    return otel
