"""The measurements of a checkout's structure, on one that is written here."""

from __future__ import annotations

from pathlib import Path

from bench.structure import circles, measure


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / "gateway" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_circle_of_imports_is_found_wherever_they_stand(tmp_path: Path) -> None:
    write(
        tmp_path,
        a="def f():\n    from gateway.b import g\n",
        b="import gateway.c\n",
        c='"""Of a."""\nfrom gateway import a\n',
        d="from gateway.a import f\n",
    )
    (found,) = measure(tmp_path)
    assert circles(found.imports) == [{"gateway.a", "gateway.b", "gateway.c"}]
    assert (found.files, found.functions, found.first_words) == (4, [2], {"Of": 1})
