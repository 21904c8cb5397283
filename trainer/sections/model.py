"""`[model]`: what is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from trainer.sections.base import Section


class ModelSettings(Section):
    """`[model]`: what is trained."""

    path: Path
    """A Hugging Face checkpoint: version 0, and the reference of a KL term."""
    dtype: Literal["float32", "bfloat16"] = "float32"
