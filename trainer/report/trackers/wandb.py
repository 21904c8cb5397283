"""Weights & Biases: one run, which every start of the trainer continues under the same id, online or offline."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.errors import ConfigError
from trainer.report.trackers.base import About


class Wandb:
    """A run of W&B; charts are drawn over the version."""

    def __init__(self, about: About) -> None:
        self._about = about
        self._run: Any = None

    def open(self, run: str | None) -> str:
        """Raises ConfigError where W&B would ask a person for the API key."""
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        about, settings = self._about, self._about.settings.wandb
        if not settings.offline and os.environ.get("WANDB_MODE") != "offline" and not wandb.api.api_key:
            raise ConfigError("no API key of W&B: set WANDB_API_KEY, or [report.wandb] offline = true")
        directory = (settings.dir or about.directory).resolve()
        directory.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            entity=settings.entity,
            project=about.settings.project,
            name=about.name,
            id=run or secrets.token_hex(4),
            resume="allow",
            dir=directory,
            mode="offline" if settings.offline else None,
            # The command line may hold secrets (`--set gateway.admin_key=...`).
            settings=wandb.Settings(console="off", silent=True, x_disable_meta=True, disable_git=True),
        )
        self._run.config.update(dict(about.config), allow_val_change=True)
        self._run.define_metric("*", step_metric="version")
        return str(self._run.id)

    def figures(self, step: int, at: float, figures: Mapping[str, float]) -> None:
        """Logs the figures under the version; W&B drops what is below its own step."""
        self._log(step, {**figures, "version": step, "_timestamp": at})

    def samples(self, step: int, at: float, rows: Sequence[Mapping[str, Any]]) -> None:
        """Logs the calls as a table."""
        self._table("samples", step, rows)

    def episodes(self, step: int, at: float, rows: Sequence[Mapping[str, Any]]) -> None:
        """Logs the episodes as a table."""
        self._table("episodes", step, rows)

    def close(self, failed: bool) -> None:
        """Waits until W&B has everything."""
        self._run.finish(exit_code=int(failed))

    def _table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        import wandb

        table = wandb.Table(columns=[*rows[0]], data=[[*row.values()] for row in rows])
        self._log(step, {name: table})

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log(values, step=max(step, self._run.step))
