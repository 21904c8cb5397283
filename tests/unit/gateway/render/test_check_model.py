"""Model folders that are accepted or refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gateway.config import ModelSettings
from gateway.config.settings import ConfigError
from gateway.render.model_folder import check_model
from gateway.render.renderer import load_renderer
from tests.families.family import named, save
from tests.harness.models import save_tokenizer


def test_a_config_is_needed_only_where_an_engine_loads_the_model(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    model = ModelSettings(path=tmp_path)
    check_model("demo", model)
    with pytest.raises(ConfigError, match=r"no config\.json"):
        check_model("demo", model, loaded=True)


def test_a_tokenizer_is_always_needed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        check_model("demo", ModelSettings(path=tmp_path))


def test_a_snapshot_of_a_cache_that_was_mounted_alone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").symlink_to("../../blobs/0123")
    with pytest.raises(
        ConfigError, match=r"tokenizer.json is a link to a file that is not here.*--local-dir"
    ):
        check_model("demo", ModelSettings(path=tmp_path))


def test_a_tokenizer_that_only_transformers_can_read_is_refused_with_the_extra_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(named("gemma3"), tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(config.read_text().replace("TokenizersBackend", "LlamaTokenizer"))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        ConfigError, match=r"\[models\.m\].*LlamaTokenizer .*pip install 'headgate\[trainer\]'"
    ):
        load_renderer("m", ModelSettings(path=tmp_path, family="template"))
