"""Reads whether a caller agrees that a conversation is trained. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headgate.errors import BadRequest

TRAIN_HEADER = "x-headgate-train"
_VALUES = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}


def consent_of(headers: Mapping[str, str], recorded: Mapping[str, Any]) -> bool | None:
    """Return True or False if the header, or `train` in the request's metadata, states it; None if neither does.

    A "no" in either counts. Raise BadRequest for a value that is neither yes nor no.
    """
    metadata = recorded.get("metadata")
    given = {TRAIN_HEADER: headers.get(TRAIN_HEADER)}
    if isinstance(metadata, dict):
        given["metadata.train"] = metadata.get("train")
    stated = [_read(place, value) for place, value in given.items() if value is not None]
    return all(stated) if stated else None


def _read(place: str, value: Any) -> bool:
    read = _VALUES.get(str(value).strip().lower())
    if read is None:
        message = f"{place}: {str(value)[:100]!r} is neither yes nor no"
        raise BadRequest(message, code="invalid_value", param=place)
    return read
