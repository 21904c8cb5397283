"""`python -m bench.gpu.check NAME`: one check in this process; the last line of stdout is its figures as JSON."""

from __future__ import annotations

import argparse
import importlib
import json
import time
import traceback
from pathlib import Path
from typing import Any

from bench.gpu.checks import BY_NAME, Check
from bench.gpu.checks.place import CheckFailed, Place


def result_of(check: Check, place: Place) -> dict[str, Any]:
    """Return `ok`, the figures, and the seconds (`check_s`); `error` if it is not ok. The traceback goes to stderr."""
    began = time.monotonic()
    result: dict[str, Any] = {"ok": True}
    try:
        place.folder.mkdir(parents=True, exist_ok=True)
        result |= importlib.import_module(f"bench.gpu.checks.{check.module}").measure(place)
    except CheckFailed as failed:
        result |= {"ok": False, "error": str(failed), **failed.figures}
    except Exception as error:
        traceback.print_exc()
        result |= {"ok": False, "error": f"{type(error).__name__}: {error}"[:500]}
    return result | {"check_s": round(time.monotonic() - began, 2)}


def main() -> None:
    """Run one check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=BY_NAME)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--engine", type=json.loads, default={})
    parser.add_argument("--gpu", default="")
    given = parser.parse_args()
    place = Place(given.device, given.folder, given.engine, given.gpu)
    print(json.dumps(result_of(BY_NAME[given.name], place)), flush=True)


if __name__ == "__main__":
    main()
