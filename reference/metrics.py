"""The page of metrics: what `/metrics` of a gateway exports, from the declarations."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Counter, Histogram, ProcessCollector

from gateway.api.live_metrics import LABELS, LIVE_METRICS
from gateway.observe.metrics import Metrics
from reference.markdown import cell, code, table


def page() -> str:
    """Return every metric with its labels, and every label with its values."""
    return "\n".join([
        "# Metrics\n",
        "`GET /metrics` of each gateway process has them, for Prometheus; `deploy/grafana` has a dashboard of them. Every process"
        " reports on itself; only the coordinator of a cluster reports on the cluster, so that sums are right.\n",
        table(("metric", "type", "labels", "meaning"), sorted(_rows())),
        "## Labels\n",
        "No label holds a value from a request: the number of time series is bounded by the configuration.\n",
        table(("label", "values"), [(code(name), cell(values)) for name, values in LABELS.items()]),
    ])  # fmt: skip


def _rows() -> Iterator[tuple[str, str, str, str]]:
    for metric in vars(Metrics()).values():
        if isinstance(metric, Counter | Histogram):
            (family,) = metric.describe()
            suffix = "_total" if family.type == "counter" else ""
            labels = ", ".join(map(code, metric._labelnames))
            yield code(family.name + suffix), family.type, labels, cell(family.documentation)
    for name, figure in LIVE_METRICS.items():
        suffix = "_total" if figure.kind == "counter" else ""
        yield (
            code(f"headgate_{name}{suffix}"),
            figure.kind,
            ", ".join(map(code, figure.labels)),
            cell(figure.text),
        )
    for family in ProcessCollector(registry=None).collect():
        yield code(family.name), family.type, "", cell(family.documentation)
