"""Pictures of the console: each view of a recorded run in Debian's Chromium.

`python -m tests.harness.pictures runs/demo` writes those of the documents to docs/pictures, light and dark, and
`python -m tests.harness.pictures runs/demo FOLDER` every view in every form of `FORMS`, to look at. They have few colors, so
that they stay small.
"""

from __future__ import annotations

import asyncio
import io
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from PIL import Image

from gateway.archive import create_archive, find_run
from headgate.processes.ports import free_port
from tests.harness.browser import Browser, Tab, expect, run_browser, tab
from tests.harness.gateways import serve

OUT = Path(__file__).parents[2] / "docs" / "pictures"
IN_DOCUMENTS = ("run", "episodes", "conversation", "group", "engines", "health")
COLORS = 128
WIDTH, HEIGHT = 1240, 700


@dataclass(frozen=True, slots=True)
class Form:
    """How a view is looked at."""

    dark: bool
    width: int
    height: int = HEIGHT

    @property
    def name(self) -> str:
        return f"{self.width}-{'dark' if self.dark else 'light'}"


FORMS = tuple(Form(dark, width, 800) for dark in (False, True) for width in (390, 1366))


def views(trained: str, failed: str) -> dict[str, tuple[str, str]]:
    """Return every view of the console by name: its address, and its heading of the first level.

    `trained` and `failed` are episodes: one that a batch was trained on, and one that sampled nothing.
    """
    of = f"episodes/{trained}?view="
    return {
        "run": ("run", "Run"),
        "episodes": ("episodes", "Episodes"),
        "staleness": ("staleness", "Staleness"),
        "engines": ("engines", "Engines and nodes"),
        "canary": ("canary", "Canary"),
        "health": ("health", "Health"),
        "config": ("files", "Config and logs"),
        "logs": ("files?view=logs", "Config and logs"),
        "conversation": (f"{of}conversation", trained),
        "template": (f"{of}conversation&text=template", trained),
        "timeline": (f"{of}timeline", trained),
        "tokens": (f"{of}tokens", trained),
        "group": (f"{of}group&color=logprob", trained),
        "why": (f"{of}why", trained),
        "failed": (f"episodes/{failed}", failed),
    }


async def show(shown: Tab, place: str, heading: str) -> None:
    """Go to a view, and wait until it shows what it has loaded."""
    await shown.show(place, heading)
    await shown.settle()
    if place == "episodes":
        await expect(shown.page.locator(".virtual-row a").first).to_be_visible()
    if "view=group" in place:
        await expect(shown.page.locator(".member .token-line").first).to_be_visible()
    if heading == "Run":
        await expect(shown.page.locator(".chart canvas").first).to_be_visible()
    await shown.settle()


async def take(run: Path, every: Path | None = None) -> list[Path]:
    """Write the pictures of a run, to `every` in all forms; return their paths."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with serve(create_archive(find_run(run)), port), run_browser() as browser:
        places = views(await _best(url), await _failed(url))
        if every is None:
            wanted = {name: places[name] for name in IN_DOCUMENTS}
            forms = {theme: Form(theme == "dark", WIDTH) for theme in ("light", "dark")}
            return [
                path
                for name, form in forms.items()
                for path in await _take(browser, url, wanted, form, OUT, name)
            ]
        return [path for form in FORMS for path in await _take(browser, url, places, form, every, form.name)]


async def _take(
    browser: Browser, url: str, places: dict[str, tuple[str, str]], form: Form, out: Path, suffix: str
) -> list[Path]:
    out.mkdir(parents=True, exist_ok=True)
    taken: list[Path] = []
    async with tab(browser, url, dark=form.dark, width=form.width, height=form.height) as shown:
        for name, (place, heading) in places.items():
            await show(shown, place, heading)
            image = Image.open(io.BytesIO(await shown.page.screenshot())).convert("RGB")
            taken.append(out / f"{name}-{suffix}.png")
            image.quantize(COLORS, dither=Image.Dither.NONE).save(taken[-1], optimize=True)
    return taken


async def _listed(url: str, **params: Any) -> list[dict[str, Any]]:
    async with httpx.AsyncClient(base_url=url) as http:
        response = (await http.get("/admin/v1/episodes", params={"limit": 100, **params})).raise_for_status()
    return list(response.json()["episodes"])


async def _failed(url: str) -> str:
    """Return an episode whose agent failed, or the worst one where none did."""
    rows = await _listed(url, reason="agent_failed") or await _listed(url, sort="worst")
    return str(rows[0]["episode_id"])


async def _best(url: str) -> str:
    """Return the best of the newest trained episodes, whose group has others to compare it with."""
    rows = [row for row in await _listed(url, mode="train", reason="rewarded") if row["reward"] is not None]
    spread = {
        row["group_id"]: {r["reward"] for r in rows if r["group_id"] == row["group_id"]} for row in rows
    }
    best = max(rows, key=lambda row: (len(spread[row["group_id"]]), row["reward"]))
    return str(best["episode_id"])


if __name__ == "__main__":
    given = [Path(argument).resolve() for argument in sys.argv[1:3]]
    for written in asyncio.run(take(*given)):
        print(f"{written.stat().st_size / 1e3:.0f} kB  {written}")
