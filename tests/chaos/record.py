"""Records the small evidence on which the checker is tested: `python -m tests.chaos.record`."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import zipfile
from pathlib import Path

from tests.chaos.__main__ import play
from tests.chaos.system import Plan

_TARGET = Path(__file__).with_name("recorded.zip")


async def _record() -> dict[str, object]:
    plan = Plan(
        seconds=8.0, every_s=1e6, gateways=1, engines=("fake", "fake"), store="sqlite", redis=False, agents=4,
        tokens=16, delay_s=0.02, batch=2, leave_share=0.2, store_share=0.4, leak_share=0.4, train_s=0.2,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        values = await play(plan, Path(folder), lambda said: print(said, file=sys.stderr))
        evidence = Path(folder) / "evidence"
        plan_file = evidence / "plan.json"
        kept = json.loads(plan_file.read_text())
        for name in ("url", "admin_key", "evidence", "trainer", "sources", "weights"):
            kept.pop(name)
        plan_file.write_text(json.dumps(kept))
        with zipfile.ZipFile(_TARGET, "w", zipfile.ZIP_DEFLATED) as archive:
            for file in sorted(evidence.rglob("*.json*")):
                archive.writestr(str(file.relative_to(evidence)), _without_paths(file, folder))
    return values


def _without_paths(file: Path, folder: str) -> str:
    return file.read_text().replace(folder, "")


if __name__ == "__main__":
    values = asyncio.run(_record())
    values.pop("page")
    print(json.dumps(values, indent=2))
