"""Tied embeddings on vLLM's CPU build are recognized before an engine is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.config.settings import Settings
from gateway.engines.tied_embeddings import stale_heads, ties_embeddings

TIED: dict[str, Any] = {"tie_word_embeddings": True}


def interpreter(folder: Path, output: str) -> Path:
    """Return a fake Python interpreter that serves every call with `output`."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\necho {output}\n")
    path.chmod(0o755)
    return path


def settings_of(
    tmp_path: Path, config: Any, output: str = "cpu", train: bool = True, **engine: Any
) -> Settings:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return Settings.parse({
        "models": {"demo": {"path": str(folder), "train": train}, "other": {"path": str(tmp_path / "none")}},
        "engine": {"launch": "vllm", "python": str(interpreter(tmp_path, output)), **engine},
    })  # fmt: skip


@pytest.mark.parametrize("config", [TIED, {"text_config": TIED}])
async def test_a_tied_model_on_the_cpu_build_is_named_with_what_to_do(tmp_path: Path, config: Any) -> None:
    (warning,) = await stale_heads(settings_of(tmp_path, config))
    assert "the model 'demo' ties its embeddings" in warning
    assert "set tie_word_embeddings to false" in warning
    assert "\n" not in warning


@pytest.mark.parametrize(
    "given",
    [
        {"config": {}},
        {"config": {"tie_word_embeddings": False}},
        {"config": [TIED]},
        {"config": TIED, "output": "0.33.0"},
        {"config": TIED, "train": False},
        {"config": TIED, "python": "/no/such/python"},
        {"config": TIED, "launch": "fake"},
    ],
)
async def test_others_are_not(tmp_path: Path, given: dict[str, Any]) -> None:
    assert await stale_heads(settings_of(tmp_path, **given)) == []


def test_a_config_that_cannot_be_read_ties_nothing(tmp_path: Path) -> None:
    assert not ties_embeddings(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert not ties_embeddings(tmp_path)
