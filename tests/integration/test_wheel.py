"""The wheel of `python -m build` runs where nothing else of headgate is: it has migrations, data files and the console."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import httpx
import pytest

from headgate.processes.child import LocalProcess
from headgate.processes.ports import free_port
from tests.harness.waiting import until

ROOT = Path(__file__).parents[2]
PACKAGES = ("gateway", "headgate", "scheduler", "trainer")
SOURCES = (
    *PACKAGES,
    "migrations",
    "pyproject.toml",
    "setup.py",
    "README.md",
    "LICENSE",
)
BUILT = ROOT / "gateway" / "console" / "dist" / "index.html"
START_S = 120.0


def run(*argv: object, cwd: Path) -> str:
    """The output of a program, which must end well."""
    done = subprocess.run(
        [str(a) for a in argv], cwd=cwd, env=alone(), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def alone() -> dict[str, str]:
    """An environment that leads to no other headgate."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sources alone, by way of the source distribution."""
    work = tmp_path_factory.mktemp("build")
    for name in SOURCES:
        here = ROOT / name
        left_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(here, work / name, ignore=left_out) if here.is_dir() else shutil.copy(
            here, work / name
        )
    run(sys.executable, "-m", "build", "--no-isolation", cwd=work)
    (found,) = (work / "dist").glob("*.whl")
    return found


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with headgate as the wheel has it, and this one's other packages."""
    place = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", "--without-pip", place, cwd=place)
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        place / "bin" / "python",
        "install",
        "--no-compile",
        "--no-deps",
        "--no-index",
        wheel,
        cwd=place,
    )
    (packages,) = place.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    return place


def test_the_wheel_has_what_no_module_is(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {"gateway/migrations/script.py.mako"}
    wanted |= {
        f"gateway/{path.relative_to(ROOT)}" for path in (ROOT / "migrations" / "versions").glob("0*.py")
    }
    wanted |= {
        str(path.relative_to(ROOT)) for path in (ROOT / "headgate").glob("weights/plugin/*.dist-info/*")
    }
    if BUILT.exists():
        wanted |= {str(path.relative_to(ROOT)) for path in BUILT.parent.rglob("*") if path.is_file()}
    assert wanted - names == set()
    assert {name.partition("/")[0] for name in names if not name.startswith("headgate-")} == set(PACKAGES)


@pytest.mark.long
async def test_an_installed_gateway_serves_and_shows_its_console(environment: Path, tmp_path: Path) -> None:
    place = run(environment / "bin" / "python", "-c", "import gateway; print(gateway.__file__)", cwd=tmp_path)
    assert Path(place.strip()).is_relative_to(environment)
    port = free_port()
    argv = [
        "env",
        "-u",
        "PYTHONPATH",
        "-C",
        str(tmp_path),
        str(environment / "bin" / "gateway"),
        "serve",
        "--demo",
        "--port",
        str(port),
    ]
    process = await LocalProcess.start("gateway", argv, tmp_path / "gateway.log")
    try:
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", follow_redirects=True, timeout=START_S
        ) as http:

            async def ready() -> bool:
                assert process.returncode is None, process.tail(50)
                try:
                    return (await http.get("/readyz")).status_code == 200
                except httpx.TransportError:
                    return False

            await until(ready, "the installed gateway is ready", START_S)
            opened = (await http.post("/admin/v1/episodes", json={"task_id": "t"})).json()
            headers = {"Authorization": f"Bearer {opened['api_key']}"}
            body = {"model": "demo", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
            assert (await http.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200
            page = await http.get("/console")
            if not BUILT.exists():
                assert (page.status_code, "make console" in page.text) == (503, True)
                return
            assert (page.status_code, "<script" in page.text) == (200, True)
            for asset in re.findall(r'(?:src|href)="\./([^"]+)"', page.text):
                assert (await http.get(f"/console/{asset}")).status_code == 200, asset
    finally:
        await process.stop()


@pytest.mark.parametrize("program", ["gateway", "trainer", "scheduler"])
def test_an_installed_program_prints_its_help_and_its_release(
    environment: Path, tmp_path: Path, program: str
) -> None:
    assert "Start here" in run(environment / "bin" / program, "--help", cwd=tmp_path)
    release = run(environment / "bin" / program, "--version", cwd=tmp_path)
    assert release == f"headgate {wheel_version()}\n"


def wheel_version() -> str:
    """The version as the project's file has it."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])
