"""The dashboard and the alerts ask for metrics that gateways have, by labels that these have, and every label is described."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prometheus_client import Counter, Histogram, ProcessCollector

from gateway.api.live_metrics import LABELS, LIVE_METRICS
from gateway.observe.metrics import Metrics

DEPLOY = Path(__file__).parents[2] / "deploy"
FROM_PROMETHEUS = {"instance", "job"}
"""Labels that Prometheus adds to every series."""
SERIES = re.compile(r"\b(?P<name>(?:headgate|process)_\w+|up)\b(?:\{(?P<matchers>[^}]*)\})?")


def metrics() -> dict[str, set[str]]:
    """Return the labels of every series, by the names that Prometheus has them under."""
    found: dict[str, set[str]] = {"up": set()}
    for metric in vars(Metrics()).values():
        if isinstance(metric, Counter):
            found[metric._name + "_total"] = set(metric._labelnames)
        elif isinstance(metric, Histogram):
            for suffix, more in (("_bucket", {"le"}), ("_sum", set()), ("_count", set())):
                found[metric._name + suffix] = set(metric._labelnames) | more
    for name, figure in LIVE_METRICS.items():
        found[f"headgate_{name}{'_total' if figure.kind == 'counter' else ''}"] = set(figure.labels)
    for family in ProcessCollector(registry=None).collect():
        found[family.name + ("_total" if family.type == "counter" else "")] = set()
    return found


def expressions() -> Iterator[tuple[str, str, str]]:
    """Where an expression is, the expression, and the text that shows its labels."""
    dashboard = json.loads((DEPLOY / "grafana" / "dashboards" / "headgate.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"], target["legendFormat"]
    for group in yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"], json.dumps(rule.get("annotations", {}))


def parts(expression: str, shown: str) -> tuple[set[str], set[str]]:
    """Return the series that an expression names, and the labels by which it chooses, sums and shows them."""
    series, labels = set(), set(re.findall(r"\{\{\s*(?:\$labels\.)?(\w+)", shown))
    for match in SERIES.finditer(expression):
        series.add(match["name"])
        labels |= set(re.findall(r"(\w+)\s*(?:=|!)", match["matchers"] or ""))
    for listed in re.findall(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)", expression):
        labels |= set(re.findall(r"\w+", listed))
    return series, labels


@pytest.mark.parametrize(("place", "expression", "shown"), expressions(), ids=lambda value: str(value)[:40])
def test_an_expression_names_series_and_labels_that_exist(place: str, expression: str, shown: str) -> None:
    known = metrics()
    series, labels = parts(expression, shown)
    assert series, f"{place}: {expression} names no metric of a gateway"
    assert series <= set(known), f"{place}: no gateway has {sorted(series - set(known))}"
    of_these = set().union(*(known[name] for name in series)) | FROM_PROMETHEUS
    assert labels <= of_these, f"{place}: {sorted(series)} have no label {sorted(labels - of_these)}"


def test_every_label_is_described_and_none_other() -> None:
    used = set().union(*metrics().values()) - {"le"}
    assert used == set(LABELS)


def test_what_hurts_training_without_an_error_is_on_the_dashboard() -> None:
    shown = " ".join(expression for _, expression, _ in expressions())
    for name in ("headgate_tool_faults_total", "headgate_errors_total", "headgate_ledger_free_slots"):
        assert name in shown
