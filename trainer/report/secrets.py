"""Secrets, kept out of what is reported."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_USER_OF_URL = re.compile(r"(?<=://)[^/@\s'\"]+@")


def without_secrets(value: Any) -> Any:
    """A value as JSON has it, with `***` in the place of users and passwords in URLs, at any depth."""
    if isinstance(value, str):
        return _USER_OF_URL.sub("***@", value)
    if isinstance(value, Mapping):
        return {key: without_secrets(each) for key, each in value.items()}
    if isinstance(value, list):
        return [*map(without_secrets, value)]
    return value
