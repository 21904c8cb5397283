"""Weights: a project publishes from its own folder, and nothing that is loaded can run code."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.weights import publish, write_manifest
from tests.security.tenants import Tenants, bearer, key_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROOT = Path(__file__).parents[2]
CODE = ("headgate", "gateway", "trainer", "scheduler", "migrations")
FORBIDDEN_MODULES = {
    "pickle",
    "_pickle",
    "cPickle",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "shelve",
    "yaml",
}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
ALLOWED: dict[tuple[str, str], str] = {
    (
        "gateway/grading/worker.py",
        "import_module",
    ): "the function that the administrator's file names as a grader",
    (
        "headgate/environments/__init__.py",
        "import_module",
    ): "the module of a kind of environment, from the registry's table",
    (
        "headgate/environments/gym.py",
        "import_module",
    ): "the function that the command line names to read an action",
    ("gateway/render/redaction.py", "import_module"): "the hook that the administrator's file names",
    ("headgate/client/agents.py", "import_module"): "the agent that the command line names",
    ("trainer/algorithms/__init__.py", "import_module"): "the algorithm that the trainer's file names",
    (
        "scheduler/reactor/snapshot.py",
        "pickle",
    ): "states in recordings: no class but the program's own is read",
    (
        "trainer/commands/warmstart.py",
        "import_module",
    ): "the examples that the configuration of the trainer names",
}
"""Modules that may load code, and whose permission they need."""


async def test_a_project_publishes_from_its_own_folder(
    stage: Tenants, tiny_model: Path, tmp_path: Path
) -> None:
    """Else its key could have any file read, or another project's weights loaded; what is there makes no difference."""
    projects = stage.gateway.settings.projects
    own = projects["ann"].weights
    assert own is not None
    outside = publish(tiny_model, tmp_path / "outside", 1, 0)
    inside = publish(tiny_model, own / "v1", 1, 0)
    (own / "link").symlink_to(outside)
    responses = set()
    for key, model, path in (
        ("ann", "ann-policy", outside),
        ("ann", "ann-policy", "/etc"),
        ("ann", "ann-policy", "/no/such/folder"),
        ("ann", "ann-policy", f"{own}/../outside"),
        ("ann", "ann-policy", f"{own}-sibling/v1"),
        ("ann", "ann-policy", own / "link"),
        ("bob", "bob-policy", inside),
        ("bob", "bob-policy", "."),
    ):
        body = {"version": 1, "path": str(path), "model": model}
        response = await stage.gateway.http.post("/admin/v1/weights", headers=bearer(key_of(key)), json=body)
        responses.add((response.status_code, response.json()["error"]["code"], response.text))
    assert len(responses) == 1 and responses.pop()[:2] == (422, "path_not_allowed")
    body = {"version": 1, "path": str(inside), "model": "ann-policy"}
    response = await stage.gateway.http.post("/admin/v1/weights", headers=bearer(key_of("ann")), json=body)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("spoil", ["content", "name", "link"])
async def test_files_that_are_not_the_manifests_are_refused(
    stage: Tenants, tiny_model: Path, tmp_path: Path, spoil: str
) -> None:
    own = stage.gateway.settings.projects["ann"].weights
    assert own is not None
    folder = publish(tiny_model, own / f"spoilt-{spoil}", 5, 0)
    file = next(folder.glob("*.safetensors"))
    if spoil == "content":
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(bytes(data))
    elif spoil == "name":
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["files"]["../../../../etc/passwd"] = {"size": 1, "sha256": ""}
        (folder / "manifest.json").write_text(json.dumps(manifest))
    else:
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
        write_manifest(folder, 5, 0)
    body = {"version": 5, "path": str(folder), "model": "ann-policy"}
    response = await stage.gateway.http.post("/admin/v1/weights", headers=bearer(key_of("ann")), json=body)
    assert response.status_code == 422, response.text


def trees() -> Iterator[tuple[str, ast.AST]]:
    for folder in CODE:
        for file in sorted((ROOT / folder).rglob("*.py")):
            yield str(file.relative_to(ROOT)), ast.parse(file.read_text())


def dangers(tree: ast.AST) -> Iterator[str]:
    """Return the calls in a module that make code out of data."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in FORBIDDEN_MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FORBIDDEN_MODULES:
            yield str(node.module)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            given = {word.arg: ast.unparse(word.value) for word in node.keywords}
            if name in FORBIDDEN_CALLS or name.endswith("import_module"):
                yield name.rpartition(".")[2]
            if name.endswith("torch.load") and given.get("weights_only") != "True":
                yield "torch.load"
            if name.rpartition(".")[2] in ("load", "loads") and given.get("allow_pickle") == "True":
                yield "allow_pickle"
            if given.get("trust_remote_code") == "True" or given.get("shell") == "True":
                yield "trust_remote_code or shell"


async def test_nothing_that_travels_is_code() -> None:
    """Neither weights nor batches nor messages between processes: no pickle and its kin, no eval, anywhere."""
    found = {(path, danger) for path, tree in trees() for danger in dangers(tree)}
    assert found == set(ALLOWED), "new: justify it in ALLOWED; gone: take it out"


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "import yaml",
        "import marshal",
        "torch.load(x)",
        "torch.load(x, weights_only=False)",
        "eval('1')",
        "exec(x)",
        "np.load(x, allow_pickle=True)",
        "AutoModel.from_pretrained(x, trust_remote_code=True)",
    ],
)
async def test_the_search_finds_what_it_is_for(line: str) -> None:
    assert list(dangers(ast.parse(line)))
