"""A real browser for tests of the console: Debian's Chromium, driven by Playwright.

Where Playwright, Chromium or the built console is missing, its tests are skipped with a sentence that names what to install. A
`tab` fails its test for whatever the page complains of: errors, violations of its Content-Security-Policy, and requests to
other hosts.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.api.console import BUILT

pytest.importorskip("playwright", reason="the tests of the console need Playwright: run `make setup`")
from playwright.async_api import Browser, Page, async_playwright, expect

AXE = Path(__file__).parents[2] / "console" / "node_modules" / "axe-core" / "axe.min.js"
_PATIENCE_MS = 100_000.0
_NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = ("--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu")
_EXCESS_WIDTH = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
_CUT_WORDS = """() => {
  const exempt = 'option, pre, svg, .unseen, .skip, .token-view';
  const found = new Set();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text = walker.nextNode(); text; text = walker.nextNode()) {
    const element = text.parentElement;
    if (!text.data.trim() || !element.checkVisibility() || element.closest(exempt)) continue;
    for (const word of text.data.matchAll(/(?<![\\w-])[A-Za-z]{3,20}(?![\\w-])/g)) {
      const range = document.createRange();
      range.setStart(text, word.index);
      range.setEnd(text, word.index + word[0].length);
      const tops = new Set([...range.getClientRects()].map((rect) => Math.round(rect.top)));
      if (tops.size > 1) found.add(`broken: ${word[0]}`);
    }
    const clipped = element.scrollWidth > element.clientWidth + 1 && getComputedStyle(element).overflowX === 'hidden';
    if (clipped && !element.closest('[title]')) found.add(`cut off: ${text.data.trim().slice(0, 60)}`);
  }
  return [...found];
}"""
"""Words that go on in the next line without a hyphen, and texts that are cut off and have no title to read them in."""
_AXE_RUN = "axe.run(document, {resultTypes: ['violations']}).then(found => found.violations)"


def needed() -> str:
    """Return Chromium's program; skip the test, with what to install, where a part is missing."""
    found = next((path for name in _NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("the tests of the console need Chromium: run `apt-get install chromium` as root")
    if not (BUILT / "index.html").is_file() or not AXE.is_file():
        pytest.skip("the tests of the console need its built page: run `make console`")
    return found


class Tab:
    """A page of the console, and what was wrong in it."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self._url = url
        self.wrong: list[str] = []
        self._refusals: tuple[int, ...] = ()
        page.on(
            "console",
            lambda entry: (
                self._note(f"console: {entry.text}") if entry.type in ("error", "warning") else None
            ),
        )
        page.on("pageerror", lambda error: self._note(f"error: {error}"))
        page.on(
            "request", lambda sent: None if sent.url.startswith(url) else self._note(f"request: {sent.url}")
        )

    def _note(self, what: str) -> None:
        if not any(f"status of {status}" in what for status in self._refusals):
            self.wrong.append(what)

    def expect_refusals(self, *statuses: int) -> None:
        """Allow responses with these statuses from now on, of which a browser complains."""
        self._refusals = statuses

    async def show(self, place: str, heading: str) -> None:
        """Go to a view, and wait for its heading."""
        await self.page.goto(f"{self._url}/console/#/{place}")
        await expect(self.page.get_by_role("heading", level=1, name=heading)).to_be_attached()

    async def settle(self) -> None:
        """Wait until the view shows what it has loaded."""
        await expect(self.page.locator("[aria-busy=true], .loading")).to_have_count(0)

    async def violations(self) -> list[str]:
        """Return what axe-core finds wrong with the page as it is, what it is too wide by, and the words that are cut."""
        await self.page.evaluate(AXE.read_text())
        found: list[dict[str, Any]] = await self.page.evaluate(_AXE_RUN)
        excess = await self.page.evaluate(_EXCESS_WIDTH)
        wide = [f"the page is {excess} pixels too wide"] if excess else []
        cut: list[str] = await self.page.evaluate(_CUT_WORDS)
        return wide + cut + [f"{one['id']}: {one['nodes'][0]['html'][:200]}" for one in found]


@asynccontextmanager
async def run_browser() -> AsyncIterator[Browser]:
    """Yield a browser for as many tabs as follow one another; to start it costs more than what a tab shows."""
    program = needed()
    expect.set_options(timeout=_PATIENCE_MS)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=program, args=_FLAGS, timeout=_PATIENCE_MS)
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def tab(
    browser: Browser, url: str, *, dark: bool = False, width: int = 1280, height: int = 800
) -> AsyncIterator[Tab]:
    """Yield a tab that shares nothing with others. Raises AssertionError at its end if the page complained of anything."""
    context = await browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if dark else "light",
        reduced_motion="reduce",
    )
    context.set_default_timeout(_PATIENCE_MS)
    opened = Tab(await context.new_page(), url)
    try:
        yield opened
    finally:
        await context.close()
    assert opened.wrong == [], opened.wrong
