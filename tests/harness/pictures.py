"""Takes the documents' pictures of the console: views of a recorded run in Debian's Chromium, light and dark.

`python -m tests.harness.pictures runs/demo` writes them to docs/pictures. They have few colors, so that they stay small.
"""

from __future__ import annotations

import asyncio
import io
import sys
from pathlib import Path

import httpx
from PIL import Image

from gateway.archive import create_archive, find_run
from headgate.processes.ports import free_port
from tests.harness.browser import Tab, expect, run_browser, tab
from tests.harness.gateways import serve

OUT = Path(__file__).parents[2] / "docs" / "pictures"
COLORS = 128
WIDTH, HEIGHT = 1240, 700


async def take(run: Path, out: Path = OUT) -> list[Path]:
    """Write the pictures of a run; return their paths."""
    out.mkdir(parents=True, exist_ok=True)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    taken: list[Path] = []
    async with serve(create_archive(find_run(run)), port), run_browser() as browser:
        episode = await _episode_to_show(url)
        for theme in ("light", "dark"):
            async with tab(browser, url, dark=theme == "dark", width=WIDTH, height=HEIGHT) as shown:
                await shown.show("run", "Run")
                taken.append(await _picture(shown, out / f"run-{theme}.png"))
                await shown.show("episodes", "Episodes")
                await expect(shown.page.locator(".virtual-row a").first).to_be_visible()
                taken.append(await _picture(shown, out / f"episodes-{theme}.png"))
                await shown.show(f"episodes/{episode}?view=group&color=logprob", episode)
                await expect(shown.page.locator(".member .token-line").first).to_be_visible()
                taken.append(await _picture(shown, out / f"group-{theme}.png"))
    return taken


async def _episode_to_show(url: str) -> str:
    """Return the best of the newest trained episodes, whose group has others to compare it with."""
    async with httpx.AsyncClient(base_url=url) as http:
        params = {"mode": "train", "reason": "rewarded", "limit": 100}
        answer = (await http.get("/admin/v1/episodes", params=params)).raise_for_status().json()
    rows = [row for row in answer["episodes"] if row["reward"] is not None]
    spread = {
        row["group_id"]: {r["reward"] for r in rows if r["group_id"] == row["group_id"]} for row in rows
    }
    best = max(rows, key=lambda row: (len(spread[row["group_id"]]), row["reward"]))
    return str(best["episode_id"])


async def _picture(shown: Tab, path: Path) -> Path:
    await shown.settle()
    seen = await shown.page.screenshot()
    image = Image.open(io.BytesIO(seen)).convert("RGB")
    image.quantize(COLORS, dither=Image.Dither.NONE).save(path, optimize=True)
    return path


if __name__ == "__main__":
    for written in asyncio.run(take(Path(sys.argv[1]).resolve())):
        print(f"{written.stat().st_size / 1e3:.0f} kB  {written}")
