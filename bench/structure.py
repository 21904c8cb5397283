"""How a checkout is built: lines by package, lengths of functions, circles of imports, docstrings by their first word.

`python -m bench.structure [ROOT]` reads the Python files of another checkout's packages, too; nothing of it is imported or run.
A circle is a set of modules of one package that import one another, be it for types alone or within functions.
"""

from __future__ import annotations

import ast
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from bench.report import show

PACKAGES = ("gateway", "trainer", "scheduler", "processes", "bench", "examples", "tests")
OPAQUE = ("What", "Of", "It", "Whether", "See", "Who")
"""First words of docstrings that do not begin with their subject."""
_Defined = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(slots=True)
class Package:
    """The figures of one package."""

    name: str
    files: int = 0
    lines: int = 0
    long_files: int = 0
    """The number of files with more than 400 lines."""
    functions: list[int] = field(default_factory=list)
    """The length of each function, in lines."""
    first_words: Counter[str] = field(default_factory=Counter)
    imports: dict[str, set[str]] = field(default_factory=dict)
    """Module to the modules that it names."""

    def read(self, path: Path, module: str) -> None:
        """Adds a file."""
        text = path.read_text()
        tree, lines = ast.parse(text), text.count("\n")
        self.files += 1
        self.lines += lines
        self.long_files += lines > 400
        self.imports[module] = set(_imported(tree))
        for node in ast.walk(tree):
            if isinstance(node, _Defined):
                self.functions.append((node.end_lineno or node.lineno) - node.lineno + 1)
            if isinstance(node, (ast.Module, ast.ClassDef, _Defined)) and (said := ast.get_docstring(node)):
                self.first_words[said.split()[0].rstrip(".,:")] += 1

    def row(self) -> list[str]:
        """The package's row of the table."""
        lengths = sorted(self.functions)
        opaque = sum(self.first_words[word] for word in OPAQUE)
        return [
            self.name,
            f"{self.files:,}",
            f"{self.lines:,}",
            str(self.long_files),
            f"{statistics.median(lengths):g}, {lengths[len(lengths) * 9 // 10]}, {lengths[-1]}",
            f"{opaque} of {self.first_words.total():,}",
            ", ".join(map(str, sorted(map(len, circles(self.imports)), reverse=True))) or "none",
        ]


def measure(root: Path) -> list[Package]:
    """Reads the packages that a checkout has."""
    found = []
    for name in PACKAGES:
        package = Package(name)
        for path in sorted((root / name).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            package.read(path, ".".join(parts[:-1] if parts[-1] == "__init__" else parts))
        if package.files:
            found.append(package)
    return found


def circles(imports: dict[str, set[str]]) -> list[set[str]]:
    """The sets of modules of which each imports, directly or by others, each."""
    edges = {
        module: {_module_of(name, imports) for name in names} - {module, ""}
        for module, names in imports.items()
    }
    reached = {module: _reached(module, edges) for module in edges}
    found: list[set[str]] = []
    for module in edges:
        if not any(module in circle for circle in found):
            circle = {other for other in reached[module] if module in reached[other]}
            found += [circle | {module}] if circle - {module} else []
    return found


def _imported(tree: ast.Module) -> Iterator[str]:
    """The names that a module imports, anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _module_of(name: str, known: dict[str, set[str]]) -> str:
    """The known module in which an imported name is: itself, or the one that it is taken from; else empty."""
    if name in known:
        return name
    parent = name.rpartition(".")[0]
    return parent if parent in known else ""


def _reached(module: str, edges: dict[str, set[str]]) -> set[str]:
    """All modules to which imports lead."""
    found: set[str] = set()
    ahead = [module]
    while ahead:
        for other in edges[ahead.pop()] - found:
            found.add(other)
            ahead.append(other)
    return found


def main(
    root: Annotated[Path, typer.Argument(help="The checkout to read.", file_okay=False, exists=True)] = Path(
        "."
    ),
) -> None:
    """Measure how a checkout is built."""
    header = (
        "package", "files", "lines", "files above 400", "function p50, p90, max", "opaque docstrings", "circles",
    )  # fmt: skip
    show("Structure", header, [package.row() for package in measure(root)], f"opaque: {', '.join(OPAQUE)}")
    readme = root / "README.md"
    if readme.exists():
        print(f"README.md: {readme.stat().st_size:,} bytes")


if __name__ == "__main__":
    typer.run(main)
