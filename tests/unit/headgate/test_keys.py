"""Keys of attempts at one episode."""

from __future__ import annotations

import pytest

from headgate.keys import attempt_key, split_attempt


@pytest.mark.parametrize(
    ("key", "episode", "attempt"),
    [
        ("hg-a_-Z", "hg-a_-Z", 1),
        (attempt_key("hg-a", 1), "hg-a", 1),
        (attempt_key("hg-a", 12), "hg-a", 12),
        ("hg-a.0", "hg-a.0", 1),
        ("hg-a.02", "hg-a.02", 1),
        ("hg-a.-2", "hg-a.-2", 1),
        ("hg-a.2\n", "hg-a.2\n", 1),
        ("hg-a.٣", "hg-a.٣", 1),
        (".2", ".2", 1),
        ("", "", 1),
    ],
)
def test_a_key_names_its_episode_and_attempt(key: str, episode: str, attempt: int) -> None:
    assert split_attempt(key) == (episode, attempt)
