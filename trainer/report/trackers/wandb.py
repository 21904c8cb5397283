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
        """Raise ConfigError without an API key, because W&B would prompt for it."""
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        about = self._about
        mode: Any = os.environ.get("WANDB_MODE")
        if mode != "offline" and not wandb.api.api_key:
            raise ConfigError("no API key of W&B: set WANDB_API_KEY, or WANDB_MODE=offline")
        self._run = wandb.init(
            project=about.settings.project,
            name=about.name,
            id=run or secrets.token_hex(4),
            resume="allow",
            dir=os.environ.get("WANDB_DIR") or about.directory,
            mode=mode,
            # The command line may hold secrets (`--set gateway.admin_key=...`).
            settings=wandb.Settings(console="off", silent=True, x_disable_meta=True, disable_git=True),
        )
        self._run.config.update(dict(about.config), allow_val_change=True)
        self._run.define_metric("*", step_metric="version")
        return str(self._run.id)

    def figures(self, step: int, at: float, figures: Mapping[str, float]) -> None:
        """Log the figures under the version; W&B drops steps below its own."""
        self._log(step, {**figures, "version": step, "_timestamp": at})

    def samples(self, step: int, at: float, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log the calls as a table."""
        self._table("samples", step, rows)

    def episodes(self, step: int, at: float, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log the episodes as a table."""
        self._table("episodes", step, rows)

    def close(self, failed: bool) -> None:
        """Wait until W&B has everything."""
        self._run.finish(exit_code=int(failed))

    def _table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        import wandb

        table = wandb.Table(columns=[*rows[0]], data=[[*row.values()] for row in rows])
        self._log(step, {name: table})

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log(values, step=max(step, self._run.step))
