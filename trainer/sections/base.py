"""The base of every table: typed, frozen, unknown keys refused."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Seconds = Annotated[float, Field(gt=0, le=7 * 86_400)]


def _names_a_function(value: str) -> str:
    if not re.fullmatch(r"[\w./-]+:\w+", value):
        raise ValueError(f"{value!r} is not an agent: module:function or path/to/file.py:function is needed")
    return value


Agent = Annotated[str, AfterValidator(_names_a_function)]
"""An agent's name: `module:function` or `path/to/file.py:function`."""


class Section(BaseModel):
    """A table of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
