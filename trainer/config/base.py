"""The types that several tables share."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator


def _names_a_function(value: str) -> str:
    if not re.fullmatch(r"[\w./-]+:\w+", value):
        raise ValueError(f"{value!r} is not an agent: module:function or path/to/file.py:function is needed")
    return value


Agent = Annotated[str, AfterValidator(_names_a_function)]
"""An agent's name: `module:function` or `path/to/file.py:function`."""
