"""MLflow: one run in a server's or a database's store, which every start of the trainer continues."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainer.report.trackers.base import About

_UNNAMEABLE = re.compile(r"[^\w\-. :/]")
"""Characters that MLflow refuses in the name of a metric."""
_TABLES = "mlflow.loggedArtifacts"
"""The tag by which MLflow knows a run's tables."""
_MOST_PARAMS = 100
_LONGEST = 500
"""Characters of a parameter's value."""


class Mlflow:
    """A run of MLflow; a metric's step is the version."""

    def __init__(self, about: About) -> None:
        self._about = about
        self._client: Any = None
        self._run = ""
        self._uri = ""

    def open(self, run: str | None) -> str:
        """Log parameters at the first start; `config.json` has those of the newest start."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        from mlflow.tracking import MlflowClient

        self._uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{self._about.directory}/mlflow.db"
        self._client = MlflowClient(tracking_uri=self._uri)
        if run is None:
            self._run = self._begin()
        else:
            self._run = run
            self._client.update_run(run, status="RUNNING")
        self._client.log_dict(self._run, dict(self._about.config), "config.json")
        return self._run

    def _begin(self) -> str:
        from mlflow.entities import Param

        experiment, about = self._experiment(), self._about
        run = str(self._client.create_run(experiment, run_name=about.name).info.run_id)
        params = [Param(name, value[:_LONGEST]) for name, value in _flat(about.config)]
        for start in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(run, params=params[start : start + _MOST_PARAMS])
        return run

    def _experiment(self) -> str:
        name = self._about.settings.project
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        local = self._uri == f"sqlite:///{self._about.directory}/mlflow.db"
        artifacts = (self._about.directory / "mlartifacts").as_uri() if local else None
        return str(self._client.create_experiment(name, artifact_location=artifacts))

    def figures(self, step: int, at: float, figures: Mapping[str, float]) -> None:
        """Log the figures in one request, which may be repeated: MLflow keeps equal figures once."""
        from mlflow.entities import Metric

        moment = int(at * 1000)
        metrics = [Metric(_UNNAMEABLE.sub("_", name), value, moment, step) for name, value in figures.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def samples(self, step: int, at: float, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the calls as one of MLflow's tables."""
        self._table("samples", step, rows)

    def episodes(self, step: int, at: float, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the episodes as a second table."""
        self._table("episodes", step, rows)

    def _table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        path = f"{name}/step-{step:06d}.json"
        table = {"columns": [*rows[0]], "data": [[*row.values()] for row in rows]}
        self._client.log_dict(self._run, table, path)
        tables = json.loads(self._client.get_run(self._run).data.tags.get(_TABLES, "[]"))
        if (entry := {"path": path, "type": "table"}) not in tables:
            self._client.set_tag(self._run, _TABLES, json.dumps([*tables, entry]))

    def close(self, failed: bool) -> None:
        """End the run, until a start continues it."""
        self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the values of a configuration as `table.key` and text."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)
