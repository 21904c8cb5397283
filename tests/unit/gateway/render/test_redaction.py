"""What `[redaction]` finds in texts, in values of JSON and among tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gateway.config import ModelSettings, RedactionSettings
from gateway.config.settings import ConfigError, Settings
from gateway.render.redaction import Redactor
from gateway.render.renderer import ChatRenderer

KEY = "sixteen-characters-or-more"


def redactor(**given: object) -> Redactor:
    return Redactor(RedactionSettings.model_validate({"key": KEY, **given}))


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("write to a.b+c@d-e.co.uk.", "a.b+c@d-e.co.uk"),
        ("call +49 30 1234567!", "+49 30 1234567"),
        ("or (415) 555-2671", "(415) 555-2671"),
        ("pay 4111-1111-1111-1111", "4111-1111-1111-1111"),
        ("use ghp_abcdefghijklmnopqrst", "ghp_abcdefghijklmnopqrst"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMII", "-----BEGIN RSA PRIVATE KEY-----\nMII"),
    ],
)
def test_what_the_patterns_find(text: str, secret: str) -> None:
    assert set(redactor(patterns=("email", "phone", "card", "key")).secrets(text)) == {secret}


@pytest.mark.parametrize(
    "text",
    [
        "2026-11-29 10:39:41",
        "192.168.100.200",
        "12.345678",
        "1764412541",
        "4111 1111 1111 1112",
        "resp_4111111111111111",
    ],
)
def test_what_they_leave(text: str) -> None:
    assert redactor(patterns=("email", "phone", "card", "key")).text(text) == text


def test_marks_are_equal_for_equal_secrets_and_keyed() -> None:
    one, other = redactor(patterns=("email",)), redactor(patterns=("email",), key=KEY + "!")
    assert one.text("a@b.example") == one.json({"x": ["a@b.example"]})["x"][0] != other.text("a@b.example")


def test_a_value_of_json_is_redacted_in_keys_numbers_and_escapes() -> None:
    value = {
        "a@b.example": 4111111111111111,
        "arguments": '{"who": "Zo\\u00eb Q", "n": 1}',
        "text": "Zoë Q",
        "n": 4111,
    }
    found = redactor(patterns=("email", "card"), rules={"name": "Zoë Q"}).json(value)
    assert str(found).count("[redacted name ") == 2
    assert next(key[:16] for key in found) == "[redacted email "
    assert found["n"] == 4111
    assert "u00eb" not in str(found)


def test_tokens_of_a_character_that_several_share(tiny_model: Path) -> None:
    renderer = ChatRenderer.load(ModelSettings(path=tiny_model))
    ids = np.asarray(renderer.encode("hi Zoë!"), np.int32)
    mask = redactor(rules={"name": "Zoë"}).tokens(ids, renderer.text_stream(), {}, len(ids))
    assert renderer.decode(ids[~mask].tolist()) == "hi !"


def test_a_reply_that_is_cut_within_a_known_secret(tiny_model: Path) -> None:
    renderer = ChatRenderer.load(ModelSettings(path=tiny_model))
    ids = np.asarray(renderer.encode("it is a.b@c.ex"), np.int32)
    mask = redactor(rules={"none": "nowhere"}).tokens(
        ids, renderer.text_stream(), {"a.b@c.example": "email"}, 0
    )
    assert renderer.decode(ids[~mask].tolist()) == "it is "


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"patterns": ["email"]}, "`key` is needed"),
        ({"rules": {"bad": "("}, "key": KEY}, "not a regular expression"),
        ({"rules": {"bad": "x*"}, "key": KEY}, "matches the empty text"),
        ({"patterns": ["name"], "key": KEY}, "'email', 'phone', 'card' or 'key'"),
    ],
)
def test_wrong_settings_are_refused_by_name(
    given: dict[str, object], complaint: str, tiny_model: Path
) -> None:
    values = {"models": {"demo": {"path": str(tiny_model)}}, "redaction": given}
    with pytest.raises(ConfigError, match=complaint):
        Settings.parse(values)


def test_it_is_for_one_process(tiny_model: Path) -> None:
    values = {
        "models": {"demo": {"path": str(tiny_model)}},
        "bus": {"url": "redis://localhost"},
        "redaction": {"patterns": ["email"], "key": KEY},
    }
    with pytest.raises(ConfigError, match="one gateway process"):
        Settings.parse(values)


def test_a_hook_that_does_not_exist_stops_the_start() -> None:
    with pytest.raises(ConfigError, match="no function nothing in json"):
        redactor(hook="json:nothing")
