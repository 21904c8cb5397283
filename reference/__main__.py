"""`python -m reference`: writes every page into docs/reference, or another folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from reference.pages import PAGES


def main() -> None:
    """Replace the pages in the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/reference"), help="the folder to write to")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, make in PAGES.items():
        (out / f"{name}.md").write_text(make(), encoding="utf-8")
    print(f"{out}: {', '.join(PAGES)}")


if __name__ == "__main__":
    main()
