"""A small OpenTelemetry collector: takes spans by OTLP/HTTP, in protobuf, and keeps them."""

from __future__ import annotations

from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route


class Collector:
    """Serve its `app`; `spans` is what came."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, Any]] = []

    def app(self) -> Starlette:
        """Take what is posted to `/v1/traces`."""
        return Starlette(routes=[Route("/v1/traces", self._take, methods=["POST"])])

    def one(self, name: str) -> Any:
        """Return the one span of a name."""
        (span,) = [span for span in self.spans if span.name == name]
        return span

    async def _take(self, request: Request) -> Response:
        sent = ExportTraceServiceRequest.FromString(await request.body())
        for of in sent.resource_spans:
            self.resources.append(facts(of.resource))
            self.spans += [span for scope in of.scope_spans for span in scope.spans]
        return Response(b"", media_type="application/x-protobuf")


def facts(of: Any) -> dict[str, Any]:
    """Return the attributes of a span or of a resource."""
    return {attribute.key: _value(attribute.value) for attribute in of.attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)
