"""The pages of docs/reference by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from pydantic import BaseModel

import gateway.cli
import headgate
import scheduler.cli
import trainer.cli
from gateway.config.settings import Settings as GatewaySettings
from reference import admin_api, command_line, configuration, errors, metrics, python_client
from scheduler.cluster.file import ClusterFile
from scheduler.planning.profile import Profile
from trainer.algorithms import REGISTRY
from trainer.config.settings import Settings as TrainerSettings
from trainer.config.settings import SupervisedSettings

_TOML = "One TOML file. Unknown keys are refused; relative paths are taken from the folder in which the program is started."
_SHARED = "It may hold the tables of gateway and trainer."
_ALGORITHMS: dict[str, type[BaseModel]] = {
    f'type = "{name}"': kind for name, kind in sorted(REGISTRY.items())
}
PROGRAMS = {"gateway": gateway.cli.app, "trainer": trainer.cli.app, "scheduler": scheduler.cli.app}

PAGES: dict[str, Callable[[], str]] = {
    "gateway-configuration": partial(
        configuration.page, "The gateway's configuration", f"{_TOML} {_SHARED} For `gateway serve --config`.", GatewaySettings, {}
    ),
    "trainer-configuration": partial(
        configuration.page, "The trainer's configuration",
        f"{_TOML} {_SHARED} For `trainer run`, `eval`, `export` and `plan-memory`.", TrainerSettings, {"algorithm": _ALGORITHMS},
    ),
    "fine-tuning-configuration": partial(
        configuration.page, "The configuration of `trainer sft`", f"{_TOML} For `trainer sft`.", SupervisedSettings, {}
    ),
    "cluster-configuration": partial(
        configuration.page, "The cluster file", f"{_TOML} For `scheduler run`.", ClusterFile, {}
    ),
    "plan-profile": partial(
        configuration.page, "The profile of `scheduler plan`", f"{_TOML} For `scheduler plan`.", Profile, {}
    ),
    "command-line": partial(command_line.page, PROGRAMS),
    "python-client": python_client.page,
    "http-api": admin_api.page,
    "metrics": metrics.page,
    "errors": partial(errors.page, Path(gateway.cli.__file__).parents[1], Path(headgate.__file__).parent),
}  # fmt: skip
