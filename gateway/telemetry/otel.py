"""Sends spans to an OTLP/HTTP collector. The one module that imports OpenTelemetry's SDK (extra `otel`).

Finished spans wait in a bounded queue for a thread of the SDK's; when the collector is slow or away, spans are dropped and calls
are not delayed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import version

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from gateway.config import TelemetrySettings
from gateway.telemetry.base import NO_TRACE, CallTrace, Facts, Step
from headgate.errors import GatewayError

_MAX_WAITING = 2_048
"""Spans that wait for the collector (OpenTelemetry's own default); more are dropped."""
_TIMEOUT_S = 5.0
"""How long one request to the collector may take with its retries; a stop of the gateway may wait as long."""

_PATH = "/v1/traces"
_BATCH = 512
"""The most spans of one request to the collector, as the SDK has it."""


def responds(endpoint: str) -> bool:
    """Return whether the collector accepts a request without spans. Block, for `_TIMEOUT_S` at most."""
    exporter = _exporter(endpoint)
    try:
        return exporter.export([]) is SpanExportResult.SUCCESS
    finally:
        exporter.shutdown()


def _exporter(endpoint: str) -> OTLPSpanExporter:
    url = endpoint.rstrip("/")
    return OTLPSpanExporter(url if url.endswith(_PATH) else url + _PATH, timeout=_TIMEOUT_S)


class OpenTelemetry:
    """Owns the SDK's queue and its thread."""

    def __init__(self, endpoint: str, settings: TelemetrySettings, process: str) -> None:
        """`process`: this process's name among others of the same service."""
        resource = Resource.create(
            {
                "service.name": settings.service,
                "service.version": version("headgate"),
                "service.instance.id": process,
            }
        )
        self._provider = TracerProvider(
            sampler=ParentBasedTraceIdRatio(settings.share), resource=resource, shutdown_on_exit=False
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                _exporter(endpoint),
                max_queue_size=_MAX_WAITING,
                max_export_batch_size=_BATCH,
            )
        )
        self._tracer = self._provider.get_tracer("headgate", version("headgate"))
        self._propagator = TraceContextTextMapPropagator()

    def call(
        self, name: str, headers: Mapping[str, str], since: float, facts: Callable[[], Facts]
    ) -> CallTrace:
        around = self._propagator.extract(headers)
        span = self._tracer.start_span(name, around, SpanKind.SERVER, start_time=int(since * 1e9))
        if not span.is_recording():
            return NO_TRACE
        span.set_attributes(facts())
        return _CallTrace(self._tracer, span)

    async def close(self) -> None:
        await asyncio.to_thread(self._provider.shutdown)


class _CallTrace:
    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span
        self._inside: Context = set_span_in_context(span, Context())

    def step(self, name: str, *, remote: bool = False) -> AbstractContextManager[Step]:
        return self._step(name, SpanKind.CLIENT if remote else SpanKind.INTERNAL)

    @contextmanager
    def _step(self, name: str, kind: SpanKind) -> Iterator[Step]:
        span = self._tracer.start_span(name, self._inside, kind)
        try:
            yield _Step(span)
        except BaseException as error:
            _fail(span, error)
            raise
        finally:
            span.end()

    def end(self, facts: Callable[[], Facts], error: BaseException | None) -> None:
        self._span.set_attributes(facts())
        if error is not None:
            _fail(self._span, error)
        self._span.end(time.time_ns())


class _Step:
    def __init__(self, span: Span) -> None:
        self._span = span

    def note(self, facts: Callable[[], Facts]) -> None:
        self._span.set_attributes(facts())


def _fail(span: Span, error: BaseException) -> None:
    """Mark a span as failed, with an `error.type` of few values; a cancelled step did not fail."""
    kind = (isinstance(error, GatewayError) and error.code) or type(error).__name__
    span.set_attribute("error.type", kind)
    if not isinstance(error, asyncio.CancelledError):
        span.set_status(Status(StatusCode.ERROR, error.message if isinstance(error, GatewayError) else kind))
