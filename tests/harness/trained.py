"""The file of what another trainer trains in a batch: its process writes it and a test reads it. Needs the standard library."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_trained(folder: Path, batch: int, rows: Iterable[tuple[list[Any], ...]]) -> None:
    """Write a batch, whole or not at all.

    `rows`: ids of the prompt and of the rest, and for each of the rest whether it is trained, its recorded log-probability, its
    reward, and the ratio of probabilities by which it is weighed.
    """
    path = folder / f"batch-{batch}-{os.getpid()}.json"
    path.with_suffix(".part").write_text(json.dumps(list(rows)))
    path.with_suffix(".part").rename(path)
