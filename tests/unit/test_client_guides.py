"""The guides to frameworks name what the tests with them run: the same classes, and the same arguments for URL and key."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON, JAVASCRIPT = ("python-frameworks.md", "clients"), ("javascript.md", "javascript")
FILES = {"openai": "openai", "@anthropic-ai/sdk": "anthropic"}
VALUES = {"URL": "episode.base_url", "KEY": "episode.api_key", "ROOT": "episode.root"}
NO_CLASSES = {"URL", "KEY", "ROOT", "INFO", "TOOLS", "True", "False"}
_SECTION = re.compile(r"^## (\S+)\n(.*?)(?=^## |\Z)", re.M | re.S)
_FENCE = re.compile(r"^```(?:python|js)\n(.*?)^```", re.M | re.S)


def guides() -> Iterator[tuple[str, str, Path]]:
    """Each framework with its code in the guide and its test."""
    for page, folder in (PYTHON, JAVASCRIPT):
        for name, section in _SECTION.findall((ROOT / "docs" / "guide" / "agents" / page).read_text()):
            if code := "\n".join(_FENCE.findall(section)):
                file = FILES.get(name, name).replace("-", "_")
                named = f"test_{file}.py" if folder == "clients" else f"{file}.test.mjs"
                yield name, code, ROOT / "tests" / "compat" / folder / named


@pytest.mark.parametrize(("name", "code", "test"), [pytest.param(*guide, id=guide[0]) for guide in guides()])
def test_a_guide_names_what_the_test_runs(name: str, code: str, test: Path) -> None:
    tested = re.sub(r"\s+", " ", test.read_text())
    classes = set(re.findall(r"\b(?:[A-Z]\w+|create\w+|setTracingDisabled|completion)\b", code)) - NO_CLASSES
    assert classes
    assert not {found for found in classes if found not in tested}
    for argument, joined, value in re.findall(r'(\w+)"?(=|: )(URL|KEY|ROOT|root)\b', code):
        wanted = VALUES.get(value, value)
        forms = (f"{argument}{joined}{wanted}", f'"{argument}": {wanted}', f"{argument}={wanted}")
        assert any(form in tested for form in forms), f"{argument} is not {value}"


def test_every_framework_that_is_tested_has_a_guide() -> None:
    tested = {
        path.stem.removeprefix("test_") for path in (ROOT / "tests" / "compat" / "clients").glob("test_*.py")
    }
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "guide" / "agents").glob("*.md"))
    text = pages.lower().replace("-", "_").replace(" ", "_")
    assert not {name for name in tested - {"coding_agents"} if name not in text}
