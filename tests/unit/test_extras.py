"""Extra dependencies: a program needs none, or its error names the extra to install."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from headgate.environments import KINDS
from headgate.extras import install_command
from tests.families.family import named, save
from tests.harness.forks import command

ROOT = Path(__file__).parents[2]
EXTRA = (
    "torch",
    "tensorboard",
    "transformers",
    "ray",
    "matplotlib",
    "wandb",
    "mlflow",
    "opentelemetry.sdk",
)
WITHOUT = f"import sys\nfor name in {EXTRA!r}: sys.modules[name] = None\n"
"""Python's own way to have an import fail as if nothing was installed."""

SERVED = """
import asyncio, sys
from gateway.app import create_app
from gateway.config.settings import Settings

print("imported:", [name for name in LATER if name in sys.modules])

async def main():
    app = create_app(Settings.parse(VALUES))
    async with app.router.lifespan_context(app):
        for model in app.state.services.models.local.values():
            print(model.renderer.decode(model.renderer.render([{"role": "user", "content": "hello"}], [])))
    print("imported:", [name for name in EXTRA if sys.modules.get(name) is not None])

asyncio.run(main())
"""


def run(code: str, *argv: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code, *argv], env=env, capture_output=True, text=True, timeout=300
    )


def test_no_package_of_an_extra_is_one_of_the_base() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    base = {re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in project["dependencies"]}
    extra = {
        re.split(r"[^\w.-]", line, maxsplit=1)[0]
        for name, lines in project["optional-dependencies"].items()
        for line in lines
    }
    assert {"torch", "transformers", "tensorboard", "ray"} <= extra
    assert not base & extra


def test_a_gateway_imports_nothing_that_only_some_need_and_no_extra_for_its_tokenizers(
    tmp_path: Path,
) -> None:
    """Migrations run once, and models are loaded when it opens; most gateways have no Redis, no PostgreSQL, no upstream model and
    no grader behind a URL, and some have no trainer."""
    later = (
        "alembic",
        "redis",
        "renderers",
        "openai",
        "pyarrow",
        "psycopg",
        "httpx",
        "rich",
        "typer",
        *EXTRA,
    )
    models = {}
    for name in ("qwen3", "qwen3 (library)", "gemma3"):
        save(named(name), tmp_path / name)
        models[name] = {"path": str(tmp_path / name), "family": named(name).family}
    values = {
        "models": models,
        "engine": {"launch": "fake", "count": 0},
        "store": {"url": f"sqlite:///{tmp_path}/gateway.db"},
    }
    done = run(f"VALUES, LATER, EXTRA = {values!r}, {later!r}, {EXTRA!r}\n{SERVED}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "imported: []"
    assert done.stdout.count("hello") == len(models)
    assert done.stdout.splitlines()[-1] == "imported: []"


@pytest.mark.parametrize("program", ["gateway", "scheduler"])
def test_a_program_starts_without_any_extra(program: str) -> None:
    done = run(f"{WITHOUT}from {program}.cli import main\nmain()", "--help")
    assert done.returncode == 0, done.stderr


def test_the_error_of_a_trainer_without_torch_names_what_to_install() -> None:
    done = run(f"{WITHOUT}from trainer.cli import main\nmain()", "run", "x.toml")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    message = r"the trainer needs \w+, which is not installed: "
    assert re.fullmatch(message + re.escape(install_command("trainer")), line)


def test_a_run_whose_tracker_is_missing_ends_in_one_line_before_it_loads_anything(tmp_path: Path) -> None:
    config = tmp_path / "trainer.toml"
    config.write_text(
        f"[run]\ndir = '{tmp_path}/run'\nsteps = 1\n[gateway]\nurl = 'http://127.0.0.1:1'\n"
        f"[model]\npath = '{tmp_path}/no-model'\n[optimizer]\nlr = 1e-3\n[report]\ntrackers = ['wandb']\n"
    )
    status, output = command("trainer.cli", "run", str(config), folder=tmp_path, missing="wandb")
    (line,) = output.splitlines()
    assert (status, line) == (
        2,
        f"[report] trackers: wandb is not installed: {install_command('trackers')}",
    )
    assert not (tmp_path / "run").exists()


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OWN = {"demo", "dev", "docs", "verifiers"}
"""Extras for this repository, and one that needs an environment of its own."""


def test_every_extra_that_a_message_or_a_page_names_exists() -> None:
    files = [
        path
        for folder in ("gateway", "headgate", "scheduler", "trainer")
        for path in (ROOT / folder).rglob("*.py")
    ]
    files += [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = "\n".join(path.read_text() for path in files)
    named = set(re.findall(r"install_command\([\"'](\w+)[\"']\)", text)) | set(KINDS) - {"fake"}
    for listed in re.findall(r"(?:headgate|'\.)\[([\w,-]+)\]", text):
        named |= set(listed.split(","))
    assert {"trainer", "otel", "verifiers"} <= named <= set(PROJECT["optional-dependencies"])


@pytest.mark.long
@pytest.mark.parametrize(
    "extras", [set(PROJECT["optional-dependencies"]) - OWN, {"verifiers"}], ids=["all", "verifiers"]
)
def test_pip_finds_versions_of_all_packages_that_fit(extras: set[str]) -> None:
    wanted = f".[{','.join(sorted(extras))}]"
    argv = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", wanted]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
