"""`trainer families`: measures families of models, and writes the matrix."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError
from trainer.families.configs import FAMILIES
from trainer.families.measure import Found, measure
from trainer.families.page import cells, page

_PACKAGES = ("transformers", "peft", "torch")


def families(names: Sequence[str], out: Path | None, tell: Callable[[str], None]) -> dict[str, Found]:
    """Measure families, all without names, and tell each as it is done; `out`: the page to write.

    Raises ConfigError for a name that is not there, and for a page of some families alone.
    """
    if unknown := [name for name in names if name not in FAMILIES]:
        raise ConfigError(f"families {', '.join(unknown)}: there are {', '.join(FAMILIES)}")
    if names and out is not None:
        raise ConfigError("--out is for all families: leave the names out")
    found: dict[str, Found] = {}
    for name in names or FAMILIES:
        found[name] = measure(FAMILIES[name])
        tell(_line(name, found[name]))
    if out is not None:
        out.write_text(page(found, {name: version(name).partition("+")[0] for name in _PACKAGES}))
    return found


def as_json(found: Mapping[str, Found]) -> dict[str, Any]:
    """Return the findings as programs read them."""
    return {"families": {name: each.to_json() for name, each in found.items()}}


def _line(name: str, found: Found) -> str:
    _, spans, rows, gap, gradient, export, adapter = cells(name, found)
    figures = f"gap {gap}, gradient {gradient}, export {export}, adapter {adapter}; " if gap else ""
    return f"{name}: spans {spans}, rows {rows}; {figures}{found.why or ''}".rstrip("; ")
