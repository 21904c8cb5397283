"""A model whose routes or kept tokens cannot be recorded is refused at the start, in one sentence that names the setting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gateway.config import ModelSettings
from gateway.config.settings import ConfigError, Settings
from gateway.engines.process import RETURN_ROUTES, command
from gateway.engines.routers import routers_of

MIXTURE = {"num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"num_hidden_layers": 2}, "not a mixture of experts"),
        ({"num_hidden_layers": 2, "num_experts": 8}, "how many of them a token goes through"),
        ({**MIXTURE, "num_experts": 70_000}, "cannot be packed"),
        ([], "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_a_model_without_readable_routers_is_refused(config: Any, what: str, tmp_path: Path) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=rf"^\[models.m\] router_replay = true: .*{what}"):
        routers_of("m", ModelSettings(path=tmp_path, router_replay=True))


@pytest.mark.parametrize(
    ("model", "engine", "what"),
    [
        ({"path": "/m"}, {"launch": "fake", "api": "sglang"}, "api = 'vllm'"),
        ({"upstream": {"url": "http://u/v1"}, "train": False}, {}, "leave `{}` out"),
    ],
)
@pytest.mark.parametrize(("key", "value"), [("router_replay", True), ("kept_tokens", 5)])
def test_engines_that_do_not_report_what_is_to_be_recorded_are_refused(
    model: Any, engine: Any, what: str, key: str, value: Any
) -> None:
    trained, what = {"path": "/t"}, what.format(key)
    models = {"t": trained, "m": {**model, key: value}}
    with pytest.raises((ConfigError, ValidationError), match=what):
        Settings.parse({"models": models, "engine": engine})


@pytest.mark.parametrize(
    ("given", "option"),
    [({"router_replay": True}, RETURN_ROUTES), ({"kept_tokens": 21}, "--max-logprobs"), ({}, "")],
)
def test_vllm_is_started_with_the_option_only_where_the_setting_is_on(given: Any, option: str) -> None:
    settings = Settings.parse({"models": {"m": {"path": "/m", **given}}})
    argv, _ = command(settings.engine_of("m"), settings.models["m"], "m", "/m", "127.0.0.1", 1)
    assert [each for each in argv if each in (RETURN_ROUTES, "--max-logprobs")] == [option] * bool(option)
