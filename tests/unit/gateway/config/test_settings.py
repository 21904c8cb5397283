"""A configuration is right, or refused with the name of what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.config import Bounds, TokenBounds
from gateway.config.settings import ConfigError, Settings

MODEL = {"models": {"demo": {"path": "models/demo"}}}


@pytest.fixture(autouse=True)
def _no_key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADGATE_ADMIN_KEY", raising=False)


def test_a_model_is_all_that_is_needed() -> None:
    settings = Settings.parse(MODEL)
    assert settings.model_name == "demo"
    assert settings.server.url == "http://127.0.0.1:8000"
    assert settings.admin.key is None


def test_an_ipv6_address_stands_in_brackets_in_the_url() -> None:
    assert Settings.parse({**MODEL, "server": {"host": "::1"}}).server.url == "http://[::1]:8000"


def test_a_public_url_is_what_agents_are_given() -> None:
    settings = Settings.parse({**MODEL, "server": {"public_url": "https://gate.example"}})
    assert settings.server.url == "https://gate.example"


@pytest.mark.parametrize(
    ("values", "where"),
    [
        ({"engines": {}}, "engines"),
        ({"models": {"demo": {"path": "x", "alias": []}}}, "models.demo.alias"),
        ({"server": {"port": 70_000}}, "server.port"),
        ({"server": {"keep_alive_s": 0}}, "server.keep_alive_s"),
        ({"server": {"body_limit_bytes": 1}}, "server.body_limit_bytes"),
        ({"staleness": {"eta": -1}}, "staleness.eta"),
        ({"staleness": {"batch": 0}}, "staleness.batch"),
        ({"episodes": {"idle_s": 1e9}}, "episodes.idle_s"),
        ({"feed": {"lease_s": "soon"}}, "feed.lease_s"),
        ({"models": {}}, "models"),
        (
            {"models": {"a": {"path": "a", "aliases": ["*"]}, "b": {"path": "b", "aliases": ["*"]}}},
            "[models]",
        ),
        (
            {"models": {"a": {"path": "a", "train": False}}},
            "[models]: at least one model must have train = true",
        ),
        ({"models": {"demo": {}}}, "models.demo"),
        ({"models": {"demo": {"upstream": {"url": "http://x/v1"}}}}, "models.demo"),
        (
            {"models": {"demo": {"path": "a"}, "u": {"upstream": {"url": "x"}, "train": False}}},
            "models.u.upstream.url",
        ),
        ({"engine": {"launch": "external", "url": "http://x", "count": 2}}, "engine"),
        ({"engine": {"transport": "collective"}}, "[engine] transport = 'collective' needs [weights]"),
        ({"engine": {"launch": "fake", "api": "sglang", "transport": "collective"}}, "engine"),
        ({"engine": {"transport": "lora", "sleep": "level2"}}, "engine: sleep = 'level2'"),
        (
            {
                "models": {"a": {"path": "a"}, "b": {"path": "b", "train": False}},
                "engine": {"launch": "external", "url": "http://x"},
            },
            "two models name the engine at ",
        ),
        ({"update": {"mode": "wait"}}, "update.mode"),
        ({"engine": {"launch": "sglang"}}, "engine.launch"),
        ({"engine": {"launch": "external"}}, "engine"),
        ({"engine": {"launch": "fake", "url": "http://127.0.0.1:1"}}, "engine"),
    ],
)
def test_what_is_wrong_is_named(values: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError) as error:
        Settings.parse({**MODEL, **values}, "gateway.toml")
    assert str(error.value).startswith("gateway.toml:\n")
    assert f"  {where}" in str(error.value)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.1.2.3", "::1"])
def test_on_the_loopback_no_admin_key_is_needed(host: str) -> None:
    assert Settings.parse({**MODEL, "server": {"host": host}}).admin.key is None


def test_the_admin_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADGATE_ADMIN_KEY", "from-outside")
    settings = Settings.parse({**MODEL, "server": {"host": "0.0.0.0"}})
    assert settings.admin.key is not None
    assert settings.admin.key.get_secret_value() == "from-outside"


def test_a_key_in_the_file_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADGATE_ADMIN_KEY", "from-outside")
    settings = Settings.parse({**MODEL, "admin": {"key": "in-the-file"}})
    assert settings.admin.key is not None
    assert settings.admin.key.get_secret_value() == "in-the-file"


def test_secrets_are_not_shown() -> None:
    settings = Settings.parse({**MODEL, "admin": {"key": "hush-hush"}})
    shown = f"{settings!r} {settings} {settings.model_dump()} {settings.model_dump_json()}"
    assert "hush-hush" not in shown


def test_a_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text('[models.demo]\npath = "m"\n[staleness]\neta = 3\n')
    assert Settings.load(file).staleness.eta == 3


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: No such file"):
        Settings.load(tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[models")
    with pytest.raises(ConfigError, match=r"broken\.toml"):
        Settings.load(broken)


def test_bounds_override_or_clamp() -> None:
    assert Bounds().apply(0.3) == 0.3
    assert Bounds(override=1.0).apply(0.0) == 1.0
    assert Bounds(override=0.0).apply(1.0) == 0.0
    assert Bounds(min=0.5, max=1.0).apply(0.0) == 0.5
    assert Bounds(min=0.5, max=1.0).apply(2.0) == 1.0


@pytest.mark.parametrize(
    ("bounds", "requested", "used"),
    [
        ({}, 30, 30),
        ({"override": 20}, 30, 20),
        ({"override": 20}, 5, 20),
        ({"override": 200}, 5, 100),
        ({"max": 10}, 30, 10),
        ({"min": 40}, 30, 40),
        ({"min": 400}, 30, 100),
        ({}, 300, 300),
    ],
)
def test_bounds_of_tokens_stay_within_the_room(bounds: dict[str, int], requested: int, used: int) -> None:
    """What an agent asks for beyond the room is refused elsewhere; bounds never ask for it."""
    assert TokenBounds(**bounds).apply(requested, 100) == used


@pytest.mark.parametrize("name", ["temperature", "top_p", "max_tokens"])
def test_the_error_for_a_plain_value_names_the_form_of_a_range(name: str) -> None:
    with pytest.raises(ConfigError, match=r"write \{ override = 1 \}"):
        Settings.parse({"models": {"m": {"path": "x"}}, "sampling": {name: 1}})


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"agents": {}}, "needs an agent with `live = true`"),
        ({"engine": {"launch": "fake"}}, "needs two engines of 'demo'"),
        ({"update": {"canary": 0.1, "order": "rolling"}}, "needs order = 'pull'"),
        ({"update": {"canary": 0.6}}, "less than or equal to 0.5"),
    ],
)
def test_a_canary_that_cannot_be_is_refused_at_the_start(
    tiny_model: Path, changes: dict[str, Any], why: str
) -> None:
    agent = {"key": "k" * 16, "mode": "train", "group_size": 1, "live": True}
    values: dict[str, Any] = {
        "models": {"demo": {"path": str(tiny_model)}},
        "engine": {"launch": "fake", "count": 2},
        "agents": {"helper": agent},
        "update": {"canary": 0.1},
    }
    Settings.parse(values)
    with pytest.raises(ConfigError, match=why):
        Settings.parse(values | changes)
