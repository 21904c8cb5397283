"""Measures the console's page in Debian's Chromium: its size, a list of many episodes, an episode of many tokens.

Owns the browser, and the gateway that it looks at; `bench.console` has the options and the report.
"""

from __future__ import annotations

import gzip
import json
import shutil
import statistics
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import typer
from playwright.async_api import Browser, Page, async_playwright
from sqlalchemy import Engine

from bench.filling import Filled, fill_episodes
from bench.processes import run_engine, run_gateway
from bench.report import Steps
from gateway.api.console import BUILT
from gateway.cli.demo import save_checkpoint
from gateway.store.connections import connect

ROUNDS = 5
_CONTEXT = 32_768
_SEEN = "() => document.querySelector('{}') && performance.now() / 1000"
_TOKENS, _ROW = ".token-window .token-line [data-piece]", '.virtual-row[aria-rowindex="{}"] a[href]'
_SCROLL = """async ([selector, by, most]) => {
    const box = document.querySelector(selector);
    let frames = 0, longest = 0, last = performance.now();
    performance.mark('scroll-begins');
    await new Promise((done) => {
        const step = (at) => {
            longest = Math.max(longest, at - last);
            last = at;
            const before = box.scrollTop;
            box.scrollTop += by;
            frames++ < most && box.scrollTop !== before ? requestAnimationFrame(step) : done();
        };
        requestAnimationFrame(step);
    });
    performance.mark('scroll-ends');
    return longest;
}"""
_TRACED = ["devtools.timeline", "disabled-by-default-devtools.timeline.frame", "blink.user_timing"]
_PRESENTED = "AnimationFrame::Presentation"


def needed() -> str:
    """Chromium's program. Raises typer.BadParameter where it or the built page is missing, with what to do."""
    found = shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        raise typer.BadParameter("the page is measured in Chromium: run `apt-get install chromium` as root")
    if not (BUILT / "index.html").is_file():
        raise typer.BadParameter("the console is not built: run `make console`")
    return found


def bundle_kb() -> float:
    """The page and all that it loads, gzip, in kB of 1,000 bytes."""
    files = [path for path in BUILT.rglob("*") if path.is_file()]
    return sum(len(gzip.compress(path.read_bytes(), 9)) for path in files) / 1e3


async def measure_pages(episodes: int, tokens: int, folder: Path, steps: Steps) -> dict[str, Any]:
    """Opens and scrolls a list of so many episodes, and an episode of so many sampled tokens."""
    folder.mkdir()
    steps.begin(f"{episodes:,} episodes and one of {tokens:,} tokens are stored")
    async with _gateway(folder) as url, _browser() as browser:
        long = await _long_episode(url, tokens)
        store = connect(f"sqlite:///{next(folder.glob('gateway-*.db'))}", 1)
        _fill(store, episodes - 1)
        steps.begin(f"the list of {episodes:,} episodes")
        listed = await _list(browser, url, episodes)
        steps.begin(f"the episode of {tokens:,} tokens")
        opened = await _tokens(browser, url, long)
    return {"bundle_kb": bundle_kb(), **opened, **listed}


@asynccontextmanager
async def _gateway(folder: Path) -> AsyncIterator[str]:
    model = folder / "words"
    save_checkpoint(model)
    async with (
        run_engine("fake", model, folder, Path()) as engine,
        run_gateway(engine, model, folder, max_model_len=_CONTEXT) as gateway,
    ):
        async with httpx.AsyncClient() as http:
            (await http.post(f"{engine.url}/fake/faults", json={"endless": True})).raise_for_status()
        yield gateway.url


@asynccontextmanager
async def _browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        browser = await playwright.chromium.launch(executable_path=needed(), args=flags)
        yield browser
        await browser.close()


async def _long_episode(url: str, tokens: int) -> str:
    """One reply of so many tokens, recorded as every reply is."""
    async with httpx.AsyncClient(base_url=url, timeout=300.0) as http:
        opened = (await http.post("/admin/v1/episodes", json={"task_id": "long"})).raise_for_status().json()
        ask = {"model": "any", "messages": [{"role": "user", "content": "Go on."}], "max_tokens": tokens}
        key = {"authorization": f"Bearer {opened['api_key']}"}
        said = (await http.post("/v1/chat/completions", json=ask, headers=key)).raise_for_status().json()
        assert said["usage"]["completion_tokens"] == tokens
        return str(opened["episode_id"])


def _fill(store: Engine, episodes: int) -> None:
    fill_episodes(store, Filled(episodes, each=1))
    store.dispose()


async def _list(browser: Browser, url: str, episodes: int) -> dict[str, Any]:
    """Seconds until the first rows are there, and from there to the last row; frames while it is scrolled."""
    first, last = _SEEN.format(_ROW.format(2)), _SEEN.format(_ROW.format(episodes + 1))
    opened: list[tuple[float, float]] = []
    ended: list[float] = []
    rates: list[tuple[float, float]] = []
    for _ in range(ROUNDS):
        page = await _page(browser)
        opened.append(await _opened(page, url, "episodes", first))
        await page.get_by_text(f"{episodes:,} episodes", exact=True).wait_for()
        rates.append(await _scrolled(browser, page, ".virtual", 90))
        began = await page.evaluate("performance.now() / 1000")
        await page.locator(".virtual").press("End")
        ended.append(await _when(page, last) - began)
        await page.close()
    return {
        "list_100k_s": statistics.median(within for _, within in opened),
        "list_fresh_s": statistics.median(fresh for fresh, _ in opened),
        "list_end_s": statistics.median(ended),
        "list_scroll_fps": statistics.median(rate for rate, _ in rates),
        "list_longest_frame_ms": max(longest for _, longest in rates),
    }


async def _tokens(browser: Browser, url: str, episode: str) -> dict[str, Any]:
    """Seconds until the first tokens are there, and frames while they are scrolled."""
    opened: list[tuple[float, float]] = []
    rates: list[tuple[float, float]] = []
    for _ in range(ROUNDS):
        page = await _page(browser)
        place = f"episodes/{episode}?view=tokens&colour=logprob"
        opened.append(await _opened(page, url, place, _SEEN.format(_TOKENS)))
        rates.append(await _scrolled(browser, page, ".token-view", 60))
        await page.close()
    return {
        "open_10k_tokens_s": statistics.median(within for _, within in opened),
        "open_fresh_s": statistics.median(fresh for fresh, _ in opened),
        "scroll_fps": statistics.median(rate for rate, _ in rates),
        "scroll_longest_frame_ms": max(longest for _, longest in rates),
    }


async def _page(browser: Browser) -> Page:
    context = await browser.new_context(viewport={"width": 1366, "height": 768})
    return await context.new_page()


async def _opened(page: Page, url: str, place: str, seen: str) -> tuple[float, float]:
    """Seconds until something of a view is seen: in a fresh tab, from its first request; and from another view of the console."""
    await page.goto(f"{url}/console/#/{place}")
    fresh = await _when(page, seen)
    await page.evaluate("location.hash = '#/health'")
    await page.get_by_role("cell").first.wait_for()
    go = "(place) => { location.hash = place; return performance.now() / 1000 }"
    began = await page.evaluate(go, f"#/{place}")
    return fresh, await _when(page, seen) - began


async def _when(page: Page, seen: str) -> float:
    return float(await (await page.wait_for_function(seen)).json_value())


async def _scrolled(browser: Browser, page: Page, selector: str, by: int) -> tuple[float, float]:
    """Frames a second that were presented while a box is scrolled by so many pixels a frame, and the longest in ms."""
    await browser.start_tracing(page=page, categories=_TRACED)
    longest = await page.evaluate(_SCROLL, [selector, by, 240])
    events = json.loads(await browser.stop_tracing())["traceEvents"]
    marks = {event["name"]: event["ts"] for event in events if event["name"].startswith("scroll-")}
    begin, end = marks["scroll-begins"], marks["scroll-ends"]
    frames = sum(event["name"] == _PRESENTED and begin <= event["ts"] <= end for event in events)
    return frames / (end - begin) * 1e6, longest
