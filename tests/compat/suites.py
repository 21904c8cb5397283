"""The suites: which tests, in which environment, and how they are run. Each writes JUnit XML, which `report.py` reads."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tests.compat.clients.gate import Episode, Gate

ROOT = Path(__file__).parents[2]
CLIENTS = "tests/compat/clients"
CODING = ROOT / ".venv-compat" / "npm" / "coding-agents"
JAVASCRIPT = ROOT / ".venv-compat" / "npm" / "javascript"
Group = Literal["SDKs", "frameworks", "coding agents", "JavaScript", "the API itself"]
"""The parts of the table, in its order."""
TIMEOUT_S = 1200


@dataclass(frozen=True, slots=True)
class Suite:
    """One row of the table."""

    name: str
    package: str
    """The distribution whose version is shown."""
    environment: str
    """`.venv-compat/NAME`, from `requirements/compat/NAME.txt`; empty: headgate's own."""
    tests: tuple[str, ...]
    """Arguments of pytest; a file of `tests/compat/javascript` for node."""
    sources: bool = False
    """The tests are the package's own: they come with its source distribution."""
    options: tuple[str, ...] = field(default=())

    group: Group = "SDKs"
    packages: Path | None = None
    """The folder of npm whose package it is."""

    @property
    def python(self) -> Path:
        """The environment's interpreter."""
        if not self.environment:
            return Path(sys.executable)
        return ROOT / ".venv-compat" / self.environment / "bin" / "python"

    @property
    def lacks(self) -> str:
        """The folder that is not installed; empty if nothing is missing."""
        needed = self.packages or (self.python.parents[1] if self.environment else ROOT)
        return "" if (needed / ".ready").exists() or needed == ROOT else str(needed.relative_to(ROOT))

    def version(self) -> str:
        """The installed version of `package`."""
        if self.packages:
            manifest = self.packages / "node_modules" / self.package / "package.json"
            return str(json.loads(manifest.read_text())["version"])
        code = f"from importlib.metadata import version; print(version({self.package!r}))"
        return subprocess.run(
            [self.python, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()


def _client(name: str, package: str, file: str, environment: str = "agents", *options: str) -> Suite:
    group: Group = "SDKs" if package in _SDKS else "frameworks"
    return Suite(name, package, environment, (f"{CLIENTS}/{file}",), options=options, group=group)


def _coding(name: str, package: str, wanted: str) -> Suite:
    tests = (f"{CLIENTS}/test_coding_agents.py", "-k", wanted)
    return Suite(name, package, "", tests, group="coding agents", packages=CODING)


def _framework(name: str, package: str, environment: str = "common") -> Suite:
    tests = (f"{CLIENTS}/test_{name.replace('-', '_')}.py",)
    return Suite(name, package, f"frameworks/{environment}", tests, group="frameworks")


def _javascript(package: str, file: str) -> Suite:
    return Suite(package, package, "", (file,), group="JavaScript", packages=JAVASCRIPT)


_SDKS = ("openai", "anthropic")
_OWN = ("chat", "test_completions.py", "test_models.py", "test_responses.py", "responses")
_OWN_TESTS = tuple(f"tests/api_resources/{part}" for part in _OWN)

SUITES = (
    _client("openai 3.x", "openai", "test_openai.py"),
    _client("openai 2.x", "openai", "test_openai.py", "openai2"),
    _client("anthropic", "anthropic", "test_anthropic.py"),
    _client("openai-agents", "openai-agents", "test_openai_agents.py"),
    _client("langchain-openai", "langchain-openai", "test_langchain.py", "agents", "--disable-recording"),
    _client("langgraph", "langgraph", "test_langgraph.py"),
    _client("pydantic-ai", "pydantic-ai-slim", "test_pydantic_ai.py"),
    _client("smolagents", "smolagents", "test_smolagents.py"),
    _client("inspect-ai", "inspect-ai", "test_inspect_ai.py"),
    _client("mini-swe-agent", "mini-swe-agent", "test_mini_swe_agent.py", "openai2"),
    _framework("autogen", "autogen-agentchat"),
    _framework("crewai", "crewai", "crewai"),
    _framework("dspy", "dspy"),
    _framework("llama-index", "llama-index-core"),
    _framework("haystack", "haystack-ai"),
    _framework("instructor", "instructor"),
    _framework("google-adk", "google-adk"),
    _framework("strands", "strands-agents"),
    _framework("agno", "agno"),
    _framework("litellm", "litellm"),
    _framework("llm", "llm", "light"),
    _framework("mirascope", "mirascope", "light"),
    _framework("magentic", "magentic", "light"),
    _framework("semantic-kernel", "semantic-kernel", "light"),
    _framework("outlines", "outlines", "light"),
    _framework("baml", "baml-py", "light"),
    _coding("Claude Code", "@anthropic-ai/claude-code", "[claude-code]"),
    _coding("Codex", "@openai/codex", "[codex]"),
    _coding("opencode", "opencode-ai", "[opencode] or opencodes"),
    _coding("Qwen Code", "@qwen-code/qwen-code", "[qwen-code]"),
    _coding("pi", "@mariozechner/pi-coding-agent", "[pi]"),
    _coding("Cline", "cline", "[cline]"),
    _coding("Continue", "@continuedev/cli", "[continue]"),
    _javascript("openai", "openai.test.mjs"),
    _javascript("@anthropic-ai/sdk", "anthropic.test.mjs"),
    _javascript("ai", "ai.test.mjs"),
    _javascript("@openai/agents", "agents.test.mjs"),
    _javascript("@langchain/openai", "langchain.test.mjs"),
    _javascript("@mastra/core", "mastra.test.mjs"),
    Suite("openai-python's own tests", "openai", "agents", _OWN_TESTS, sources=True, group="the API itself"),
    Suite("our OpenAPI schema", "schemathesis", "", ("tests/compat/test_schema.py",), group="the API itself"),
)


class Skipped(Exception):
    """A suite that cannot be run here; the message has the reason."""


def run(suite: Suite, gate: Gate, work: Path) -> Path:
    """Run a suite and return its JUnit XML. Raise Skipped if it cannot run."""
    if suite.lacks:
        raise Skipped(f"not installed: make {suite.lacks}/.ready")
    result = work / f"{re.sub(r'[^a-z0-9]+', '-', suite.name.lower())}.xml"
    if suite.packages == JAVASCRIPT:
        _node(suite, _environment(gate), work, result)
    elif suite.sources:
        _pytest(suite, _sources(suite, work), _own_environment(suite, gate, work), result)
    else:
        _pytest(suite, ROOT, _environment(gate), result)
    if not result.exists():
        raise Skipped(f"its runner ended without a result; see {result.with_suffix('.log')}")
    return result


def _pytest(suite: Suite, folder: Path, env: dict[str, str], result: Path) -> None:
    ini = ["-n", "0"] if suite.sources else ["-c", "tests/compat/clients.ini", "--rootdir", str(ROOT)]
    argv = [suite.python, "-m", "pytest", *ini, "-q", "--tb=short", f"--junitxml={result}", *suite.options]
    with result.with_suffix(".log").open("wb") as log:
        subprocess.run([*argv, *suite.tests], cwd=folder, env=env, stdout=log, stderr=log, timeout=TIMEOUT_S)


def _node(suite: Suite, env: dict[str, str], work: Path, result: Path) -> None:
    """Node finds packages upward from the file that imports them, so the tests are copied next to a link to these."""
    folder = work / "javascript"
    shutil.copytree(ROOT / "tests" / "compat" / "javascript", folder, dirs_exist_ok=True)
    if not (folder / "node_modules").exists():
        (folder / "node_modules").symlink_to(JAVASCRIPT / "node_modules")
    node = shutil.which("node", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    argv = [node or "node", "--test", "--test-reporter=junit", f"--test-reporter-destination={result}"]
    with result.with_suffix(".log").open("wb") as log:
        subprocess.run([*argv, *suite.tests], cwd=folder, env=env, stdout=log, stderr=log, timeout=TIMEOUT_S)


def _environment(gate: Gate) -> dict[str, str]:
    given = {"HEADGATE_COMPAT_GATEWAY": gate.gateway, "HEADGATE_COMPAT_ENGINE": gate.engine}
    given["HEADGATE_COMPAT_EXAMPLES"] = "40"
    return {**os.environ, **given}


# The package's own tests


def _own_environment(suite: Suite, gate: Gate, work: Path) -> dict[str, str]:
    """The suites take the base URL from the environment; this episode's key replaces the one in their conftest."""
    episode: Episode = gate.open(suite.name)
    conftest = work / _folder(suite) / "tests" / "conftest.py"
    text, count = re.subn(
        r'^api_key = ".*"', f'api_key = "{episode.api_key}"', conftest.read_text(), flags=re.M
    )
    if count != 1:
        raise Skipped(f"{conftest} holds no key that could be replaced")
    conftest.write_text(text)
    return {**_environment(gate), "TEST_API_BASE_URL": episode.base_url}


def _sources(suite: Suite, work: Path) -> Path:
    """The source distribution of the installed version, unpacked: it brings the tests, at exactly this version."""
    wanted = f"{suite.package}=={suite.version()}"
    argv = [
        suite.python,
        "-m",
        "pip",
        "download",
        "-qq",
        "--no-deps",
        "--no-binary",
        ":all:",
        "-d",
        work,
        wanted,
    ]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S)
    archives: Sequence[Path] = sorted(work.glob(f"{_folder(suite)}.tar.gz"))
    if done.returncode or not archives:
        raise Skipped(f"pip has no source distribution of {wanted}: {done.stderr.strip()[-200:]}")
    with tarfile.open(archives[0]) as archive:
        archive.extractall(work, filter="data")
    return work / _folder(suite)


def _folder(suite: Suite) -> str:
    return f"{suite.package}-{suite.version()}"
