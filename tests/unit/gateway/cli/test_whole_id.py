"""Ids of episodes may be typed as unique prefixes."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from gateway.cli.show import whole_id

IDS = ["ep-2c4fcce550c00cd6f818", "ep-2c4faaaaaaaaaaaaaaaa", "ep-77aabbccddeeff001122"]


class Client:
    """Finds episodes by a part of any of their texts, as the gateway does."""

    async def episodes(self, text: str, limit: int) -> list[dict[str, Any]]:
        return [{"episode_id": each} for each in IDS if text in each]


@pytest.mark.parametrize(
    ("typed", "whole"),
    [
        ("ep-77", IDS[2]),
        ("77aa", IDS[2]),
        ("ep-2c4fc", IDS[0]),
        ("bbcc", "bbcc"),  # in the middle of an id
        ("ep-ffffffffffffffffffff", "ep-ffffffffffffffffffff"),
    ],
)
async def test_a_unique_prefix_is_the_id(typed: str, whole: str) -> None:
    assert await whole_id(Client(), typed) == whole


async def test_several_ids_with_one_prefix_are_named() -> None:
    with pytest.raises(
        typer.BadParameter, match="2 ids begin so, such as ep-2c4fcce550c00cd6f818, ep-2c4faa"
    ):
        await whole_id(Client(), "ep-2c4f")
