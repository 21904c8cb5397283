"""The base of every table: typed, frozen, unknown keys refused."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Seconds = Annotated[float, Field(gt=0, le=7 * 86_400)]

AGENT = r"^[\w./-]+:\w+$"
"""An agent's name: `module:function` or `path/to/file.py:function`."""


class Section(BaseModel):
    """A table of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
