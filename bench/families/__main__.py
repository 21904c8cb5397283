"""`python -m bench.families [NAME ...] [--out PAGE] [--json]`: measures families of models, and writes the matrix.

Uses tiny random models of each family; all of them take about ten minutes on one core.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from bench.families.configs import FAMILIES
from bench.families.measure import Found, measure
from bench.families.page import cells, page
from trainer.errors import ConfigError

_PACKAGES = ("transformers", "peft", "torch")


def families(names: Sequence[str], out: Path | None, notify: Callable[[str], None]) -> dict[str, Found]:
    """Measure families, all without names, and report each by `notify`. `out`: the page to write.

    Raise ConfigError for an unknown name, and for a page of only some families.
    """
    if unknown := [name for name in names if name not in FAMILIES]:
        raise ConfigError(f"families {', '.join(unknown)}: there are {', '.join(FAMILIES)}")
    if names and out is not None:
        raise ConfigError("--out is for all families: leave the names out")
    found: dict[str, Found] = {}
    for name in names or FAMILIES:
        found[name] = measure(FAMILIES[name])
        notify(_line(name, found[name]))
    if out is not None:
        out.write_text(page(found, {name: version(name).partition("+")[0] for name in _PACKAGES}))
    return found


def _line(name: str, found: Found) -> str:
    _, spans, rows, gap, gradient, export, adapter, replay, experts = cells(name, found)
    figures = f"gap {gap}, gradient {gradient}, export {export}, adapter {adapter}; " if gap else ""
    figures += f"replay {replay}; " if replay else ""
    figures += f"experts {experts}; " if experts else ""
    return f"{name}: spans {spans}, rows {rows}; {figures}{found.why or ''}".rstrip("; ")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the named families, or all; `--json` prints the findings as the last line."""
    parser = argparse.ArgumentParser(prog="python -m bench.families")
    parser.add_argument("names", nargs="*", help="families, such as qwen3; all without names")
    parser.add_argument("--out", type=Path, help="write the matrix of all families as Markdown")
    parser.add_argument("--json", action="store_true", help="print all findings as one JSON object")
    options = parser.parse_args(arguments)
    found = families(options.names, options.out, print)
    if options.json:
        print(json.dumps({"families": {name: each.to_json() for name, each in found.items()}}))


if __name__ == "__main__":
    main()
