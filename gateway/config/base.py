"""The types that several tables of the configuration file share."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

Days = Annotated[float, Field(gt=0, le=36_500)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]
