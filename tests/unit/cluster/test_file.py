"""The cluster file: what is refused, and by which words."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler.cluster.errors import BadFile
from scheduler.cluster.file import ClusterFile, GatewayFile, check_trainer
from scheduler.cluster.machine import LocalLauncher

ROOT = Path(__file__).parents[3]
GATEWAY = '[gateway]\nconfig = "gateway.toml"\n'
NODE = '[nodes.a]\ntags = ["rollout"]\n'
RAY = '[cluster]\nlauncher = "ray"\n'


def load(folder: Path, text: str) -> ClusterFile:
    """A file with this text."""
    path = folder / "cluster.toml"
    path.write_text(text)
    return ClusterFile.load(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GATEWAY, "[nodes.NAME] is needed"),
        (NODE, "gateway: Field required"),
        (GATEWAY + '[nodes.a]\ntagz = ["rollout"]', "nodes.a.tagz: there is no such key"),
        (GATEWAY + '[nodes."a b"]\n', "nodes.a b.[key]"),
        (GATEWAY + '[nodes.a]\ntags = ["under score!"]', "nodes.a.tags.0"),
        (GATEWAY + '[nodes.a]\ncpus = -1', "nodes.a.cpus"),
        (GATEWAY + NODE + '[cluster]\nlauncher = "slurm"', "cluster.launcher: Input should be 'local' or 'ray'"),
        (GATEWAY + NODE + '[[groups]]\nname = "g"\ntags = ["rollout"]', "[[groups]] are of a Ray cluster"),
        (GATEWAY + '[nodes.a]\ntags = ["rollout"]\nlabels = {x = "y"}', "[nodes.a] labels: only the nodes of a Ray"),
        (RAY + GATEWAY + "[nodes.a]\n", "[nodes.a]: tags or labels are needed"),
        (RAY + GATEWAY + NODE + "cpus = 4", "[nodes.a] cpus, gpus, memory_gb: Ray knows them"),
        (RAY + GATEWAY + NODE + '[[groups]]\nname = "a"\ntags = ["x"]', "[[groups]]: a would mean two"),
        (RAY + GATEWAY + '[[groups]]\nname = "a"\ntags = ["x"]\ncount = 3\nmost = 2', "most = 2 is less than count"),
        (GATEWAY + NODE + "spare = true", "[nodes.a] spare: nothing would ever use it without [elastic]"),
        (GATEWAY + NODE + '[trainer]\nconfig = "t.toml"\nranks = 2', "headgate's trainer is one process (ranks = 1)"),
        (GATEWAY + NODE + "[trainer]\nranks = 2", "exactly one of `config` and `command` is needed"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(BadFile) as raised:
        load(tmp_path, text)
    assert said in str(raised.value)
    assert str(tmp_path / "cluster.toml") in str(raised.value)


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ("", r"\[engine\] count = 0 is needed: the cluster starts demo's engines"),
        ('launch = "fake"\ncount = 2', r"\[engine\] count = 0 is needed"),
        (
            'launch = "external"\nurl = "http://127.0.0.1:1"',
            r"\[engine\] launch: 'external' does not say how",
        ),
    ],
)
def test_a_gateway_that_has_engines_of_its_own_is_refused(tmp_path: Path, engine: str, said: str) -> None:
    path = tmp_path / "gateway.toml"
    path.write_text(f'[models.demo]\npath = "x"\n[engine]\n{engine}\n')
    with pytest.raises(BadFile, match=said):
        GatewayFile.read(path, None, {})


def test_what_is_read_of_the_gateways_file(tmp_path: Path) -> None:
    path = tmp_path / "gateway.toml"
    path.write_text(
        '[server]\nhost = "0.0.0.0"\nport = 9000\n[admin]\nport = 9001\nhost = "127.0.0.1"\n'
        '[models.judge]\npath = "x"\ntrain = false\n[models.demo]\npath = "x"\n[engine]\nlaunch = "fake"\ncount = 0\n'
    )
    found = GatewayFile.read(path, None, {"HEADGATE_ADMIN_KEY": "k"})
    assert (found.url, found.admin_url, found.key) == ("http://127.0.0.1:9000", "http://127.0.0.1:9001", "k")
    assert found.model == "demo"
    with pytest.raises(BadFile, match="no model 'other'; there are: judge, demo"):
        GatewayFile.read(path, "other", {})


def test_a_trainer_that_would_start_a_gateway_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trainer.toml"
    path.write_text('[gateway]\nconfig = "gateway.toml"\n')
    with pytest.raises(BadFile, match=r"\[gateway\] url is needed"):
        check_trainer(path)


@pytest.mark.parametrize("name", ["colocated", "disaggregated", "mixed", "ray"])
def test_the_examples_are_well(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    file = ClusterFile.load(Path("examples", "clusters", f"{name}.toml"))
    GatewayFile.read(file.gateway.config, file.engine.model, {})
    assert file.trainer is not None and file.trainer.config is not None
    check_trainer(file.trainer.config)


async def test_the_nodes_of_a_machine_have_what_it_has_unless_they_say_less(tmp_path: Path) -> None:
    text = (
        GATEWAY
        + '[nodes.a]\ntags = ["rollout"]\ngpus = 2\ncpus = 1.5\n[nodes.b]\ntags = ["rollout"]\ngpus = 1\n'
    )
    first, second = await LocalLauncher(load(tmp_path, text)).seen()
    assert (first.id, first.capacity.cpus, first.capacity.gpus) == ("a", 1.5, 2)
    assert second.capacity.cpus >= 1
    assert second.capacity.memory_gb > 0
