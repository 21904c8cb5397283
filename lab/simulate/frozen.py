"""The files that were settled before headgate's own policy was tuned: coefficients, baselines, and the grid of scenarios.

`digest` is over their bytes. Its value is held by tests/unit/lab/simulate/test_frozen.py; a change of one of these
files is explained there, and every policy is run again.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

HERE = Path(__file__).parent


def files() -> list[Path]:
    """Return the frozen files, in order."""
    return [
        HERE / "coefficients.toml",
        *sorted((HERE / "baselines").glob("*.py")),
        *sorted((HERE / "scenarios").glob("*.toml")),
    ]


def digest() -> str:
    """Return the SHA-256 over their names and bytes, in hexadecimal."""
    found = hashlib.sha256()
    for path in files():
        found.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()
