"""The cluster file: what is refused, and by which messages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scheduler.cluster.errors import BadFile
from scheduler.cluster.file import MANY, ClusterFile, check_trainer
from scheduler.cluster.gateway_file import GatewayFile
from scheduler.cluster.launch import DEVICES, Job, visible
from scheduler.cluster.machine import LocalLauncher
from scheduler.cluster.preflight import examine
from scheduler.cluster.tags import NODE_LABEL, Capacity, DiscoveredNode, NodeGroup, NodeInUse, Placement

ROOT = Path(__file__).parents[4]
GATEWAY = '[gateway]\nconfig = "gateway.toml"\n'
NODE = '[nodes.a]\ntags = ["rollout"]\n'
GROUP = NodeGroup("g", ("train",))
RAY = '[cluster]\nlauncher = "ray"\n'


def load(folder: Path, text: str) -> ClusterFile:
    """A file with this text."""
    path = folder / "cluster.toml"
    path.write_text(text)
    return ClusterFile.load(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GATEWAY, "[nodes.NAME] is needed"),
        (NODE, "gateway: Field required"),
        (GATEWAY + '[nodes.a]\ntagz = ["rollout"]', "nodes.a.tagz: there is no such key"),
        (GATEWAY + '[nodes."a b"]\n', "nodes.a b.[key]"),
        (GATEWAY + '[nodes.a]\ntags = ["under score!"]', "nodes.a.tags.0"),
        (GATEWAY + '[nodes.a]\ncpus = -1', "nodes.a.cpus"),
        (GATEWAY + NODE + '[cluster]\nlauncher = "slurm"', "cluster.launcher: Input should be 'local' or 'ray'"),
        (GATEWAY + NODE + '[[groups]]\nname = "g"\ntags = ["rollout"]', "[[groups]] need a Ray cluster"),
        (GATEWAY + '[nodes.a]\ntags = ["rollout"]\nlabels = {x = "y"}', "[nodes.a] labels: only the nodes of a Ray"),
        (RAY + GATEWAY + "[nodes.a]\n", "[nodes.a]: tags or labels are needed"),
        (RAY + GATEWAY + NODE + "cpus = 4", "[nodes.a] cpus, gpus, memory_gb: Ray knows them"),
        (RAY + GATEWAY + NODE + '[[groups]]\nname = "a"\ntags = ["x"]', "[[groups]]: a would mean two"),
        (RAY + GATEWAY + '[[groups]]\nname = "a"\ntags = ["x"]\ncount = 3\nmost = 2', "most = 2 is less than count"),
        (GATEWAY + NODE + "spare = true", "[nodes.a] spare: only [elastic] uses spare nodes"),
        (GATEWAY + '[nodes.a]\ntags = ["train"]\nspare = true\n[elastic]\n', "[nodes.a] spare: it has no engines"),
        (GATEWAY + NODE + '[trainer]\ncommand = ["x"]\n[elastic]\n', "[elastic] needs a trainer that reports its busy time"),
        (GATEWAY + NODE + "[elastic]\nranks = 2", "[elastic] ranks: [trainer] is needed"),
        (GATEWAY + NODE + '[trainer]\nconfig = "t.toml"\nranks = 4\n[elastic]\nranks = 2', "with no more ranks than that"),
        (GATEWAY + '[nodes.a]\ntags = ["train"]\nengine_gpus = 2', "a: engine_gpus: it has no engines"),
        (GATEWAY + NODE + 'engine_gpus = 2\n[engine]\ncommand = ["x"]', "[engine] command must contain {gpus}"),
        (GATEWAY + NODE + "engine_gpus = 2\n[elastic]\n", "[elastic] assumes that all engines are equally fast"),
        (GATEWAY + NODE + "[trainer]\nranks = 2", "exactly one of `config` and `command` is needed"),
        (GATEWAY + NODE + '[trainer]\nconfig = "t.toml"\ncommand = ["x"]', "exactly one of `config` and `command`"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BadFile) as raised:
        load(tmp_path, text)
    assert message in str(raised.value)
    assert str(tmp_path / "cluster.toml") in str(raised.value)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("", r"\[engine\] count = 0 is needed: the cluster starts demo's engines"),
        ('launch = "fake"\ncount = 2', r"\[engine\] count = 0 is needed"),
        (
            'launch = "external"\nurl = "http://127.0.0.1:1"',
            r"\[engine\] launch: 'external' has no command for",
        ),
    ],
)
def test_a_gateway_that_has_engines_of_its_own_is_refused(tmp_path: Path, engine: str, message: str) -> None:
    path = tmp_path / "gateway.toml"
    path.write_text(f'[models.demo]\npath = "x"\n[engine]\n{engine}\n')
    with pytest.raises(BadFile, match=message):
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
    path.write_text(
        path.read_text()
        .replace("port = 9001", 'port = 9001\nkey = "own"')
        .replace('host = "127.0.0.1"\n', "")
    )
    found = GatewayFile.read(path, "judge", {"HEADGATE_ADMIN_KEY": "k"})
    assert (found.admin_url, found.key, found.model) == ("http://127.0.0.1:9001", "own", "judge")
    with pytest.raises(BadFile, match="no model 'other'; known models: judge, demo"):
        GatewayFile.read(path, "other", {})
    path.write_text(path.read_text().replace('"0.0.0.0"', '"fd00::7"'))
    assert GatewayFile.read(path, None, {}).url == "http://[fd00::7]:9000"


@pytest.mark.parametrize(
    "engine", ["tensor_parallel = 2", 'args = ["--tensor-parallel-size=2"]', 'args = ["-tp", "2"]']
)
def test_gpus_that_are_reserved_and_not_used_are_refused(tmp_path: Path, engine: str) -> None:
    path = tmp_path / "gateway.toml"
    path.write_text(f'[models.demo]\npath = "x"\n[engine]\ncount = 0\n{engine}\n')
    found = GatewayFile.read(path, None, {})
    for reserved in (None, 2):
        found.check_gpus(reserved)
    for reserved in (0, 1, 8):
        with pytest.raises(BadFile, match=rf"spread over 2 GPUs .* reserves {reserved} for it"):
            found.check_gpus(reserved)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("tensor_parallel = 2", ""),
        ('args = ["-tp", "2"]', "tensor_parallel"),
        ('launch = "fake"', "only vLLM is spread"),
    ],
)
def test_nodes_have_a_number_of_their_own_only_where_it_counts(
    tmp_path: Path, engine: str, message: str
) -> None:
    path = tmp_path / "gateway.toml"
    path.write_text(f'[models.demo]\npath = "x"\n[engine]\ncount = 0\n{engine}\n')
    found = GatewayFile.read(path, None, {})
    if message:
        with pytest.raises(BadFile, match=message):
            found.check_gpus(1, [4])
        return
    found.check_gpus(1, [4])  # no engine has the file's number
    with pytest.raises(BadFile, match="reserves 1 for it"):
        found.check_gpus(1, [4, None])


@pytest.mark.parametrize(
    ("server", "message"),
    [("", "which works only on this machine"), ('[server]\npublic_url = "http://head:8000"\n', "")],
)
def test_missing_files_are_reported_before_anything_starts(tmp_path: Path, server: str, message: str) -> None:
    path, model = tmp_path / "gateway.toml", tmp_path / "model"
    text = f'{server}[models.demo]\npath = "{model}"\n[engine]\ncount = 0\npython = "{{python}}"\n'
    file = load(tmp_path, RAY + GATEWAY + NODE)
    path.write_text(text.format(python="no-such-python"))
    with pytest.raises(BadFile, match="'no-such-python': no such program"):
        examine(file, GatewayFile.read(path, None, {}))
    path.write_text(text.format(python=sys.executable))
    with pytest.raises(BadFile, match="no checkpoint exists there"):
        examine(file, GatewayFile.read(path, None, {}))
    model.mkdir()
    (model / "config.json").write_text("{}")
    assert message in "".join(examine(file, GatewayFile.read(path, None, {})))
    assert bool(message) is bool(examine(file, GatewayFile.read(path, None, {})))


def test_ranks_of_a_node_see_all_its_gpus_in_the_order_of_their_local_numbers() -> None:
    one, two = (NodeInUse(name, GROUP, DiscoveredNode(name, {}, Capacity(8, 4, 64))) for name in "ab")
    jobs = [Job(Placement(f"t-{i}", node, n), (), {}, True, Capacity()) for i, (node, n) in
            enumerate([(one, 0), (one, 1), (two, 0), (two, 1)])]  # fmt: skip
    assert visible(jobs, [["3"], ["1"], ["0"], []]) == [
        {DEVICES: "3,1"}, {DEVICES: "3,1"}, {DEVICES: "0"}, {}
    ]  # fmt: skip


def test_the_first_model_that_has_engines_and_is_trained_is_the_engines_and_its_own_table_counts(
    tmp_path: Path,
) -> None:
    path = tmp_path / "gateway.toml"
    path.write_text(
        '[models.far]\nupstream = "http://127.0.0.1:1"\n[models.judge]\npath = "x"\ntrain = false\n'
        '[models.demo]\npath = "x"\n[models.demo.engine]\ncount = 0\n[engine]\ncount = 1\n'
    )
    assert GatewayFile.read(path, None, {}).model == "demo"
    path.write_text(path.read_text().replace("count = 0", "count = 2").replace("count = 1", "count = 0"))
    with pytest.raises(BadFile, match="the cluster starts demo's engines"):
        GatewayFile.read(path, None, {})


def test_an_admin_api_without_a_host_of_its_own_has_the_servers(tmp_path: Path) -> None:
    path = tmp_path / "gateway.toml"
    text = (
        '[server]\nhost = "10.0.0.7"\n[admin]\nport = 9001\n[models.demo]\npath = "x"\n[engine]\ncount = 0\n'
    )
    path.write_text(text)
    found = GatewayFile.read(path, None, {})
    assert (found.url, found.admin_url) == ("http://10.0.0.7:8000", "http://10.0.0.7:9001")
    path.write_text(text.replace("[admin]", "port = 0\n[admin]"))
    with pytest.raises(BadFile, match=r"\[server\] port = 0: the cluster needs a fixed port"):
        GatewayFile.read(path, None, {})


@pytest.mark.parametrize("text", ['config = "gateway.toml"', 'config = "gateway.toml"\nurl = "http://x"', ""])
def test_a_trainer_that_would_start_a_gateway_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trainer.toml"
    path.write_text(f"[gateway]\n{text}\n")
    with pytest.raises(BadFile, match=r"\[gateway\] url is needed"):
        check_trainer(path)
    path.write_text('[gateway]\nurl = "http://127.0.0.1:8000"\n')
    check_trainer(path)


def test_the_nodes_that_are_wanted_of_one_machine(tmp_path: Path) -> None:
    """Each is found by its name, and has an engine if its tags are for engines, or its own number of them."""
    text = (
        GATEWAY
        + '[nodes.a]\ntags = ["rollout", "train"]\nzone = "z"\n[nodes.b]\ntags = ["train"]\n'
        + '[nodes.c]\ntags = ["rollout"]\nengines = 0\n[nodes.d]\ntags = ["rollout"]\nengines = 3\nspare = true\n[elastic]\n'
    )
    wanted = {group.name: group for group in load(tmp_path, text).wanted()}
    assert {name: group.engines for name, group in wanted.items()} == {"a": 1, "b": 0, "c": 0, "d": 3}
    assert {name: group.count for name, group in wanted.items()} == {"a": 1, "b": 1, "c": 1, "d": 0}
    assert wanted["a"].selector == {NODE_LABEL: "a"}
    assert (wanted["a"].zone, wanted["a"].tags) == ("z", ("rollout", "train"))


def test_the_nodes_that_are_wanted_of_a_ray_cluster(tmp_path: Path) -> None:
    """Nodes are found by their labels; a group without a maximum may have any number of nodes above its minimum."""
    text = (
        RAY
        + GATEWAY
        + '[nodes.a]\nlabels = {disk = "fast"}\n[[groups]]\nname = "g"\ntags = ["rollout"]\nhardware = "h100"\ncount = 2\n'
        + '[[groups]]\nname = "few"\ntags = ["train"]\ncount = 2\nmost = 2\n'
    )
    named, group, few = load(tmp_path, text).wanted()
    assert (named.selector, named.count, named.most, named.engines) == ({"disk": "fast"}, 1, 1, 0)
    assert group.selector == {"rollout": "true", "hardware": "h100"}
    assert (group.count, group.most, group.engines) == (2, MANY, 1)
    assert (few.count, few.most) == (2, 2)


@pytest.mark.parametrize(
    ("trainer", "lent"),
    [
        ("", False),
        ('[trainer]\nconfig = "t.toml"', True),
        ('[trainer]\nconfig = "t.toml"\nclaims = false', False),
        ('[trainer]\ncommand = ["x"]', False),
        ('[trainer]\ncommand = ["x"]\nclaims = true', True),
    ],
)
def test_nodes_are_lent_only_by_a_trainer_that_claims_them(tmp_path: Path, trainer: str, lent: bool) -> None:
    unlent = load(tmp_path, GATEWAY + NODE + trainer).unlent
    assert unlent == (frozenset() if lent else {"train"})


def test_a_capacity_of_zero_is_nothing(tmp_path: Path) -> None:
    text = GATEWAY + NODE + "cpus = 0\ngpus = 0\nmemory_gb = 0\n"
    assert load(tmp_path, text).nodes["a"].capacity(Capacity(8, 2, 64)) == Capacity()
    half = load(tmp_path, GATEWAY + NODE + "memory_gb = 2.5\n").nodes["a"]
    assert half.capacity(Capacity(8, 2, 64)) == Capacity(8, 2, 2.5)


@pytest.mark.parametrize("name", ["colocated", "disaggregated", "mixed", "ray"])
def test_the_examples_are_valid(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    file = ClusterFile.load(Path("examples", "clusters", f"{name}.toml"))
    GatewayFile.read(file.gateway.config, file.engine.model, {})
    assert file.trainer is not None and file.trainer.config is not None
    check_trainer(file.trainer.config)


async def test_the_nodes_of_a_machine_have_what_it_has_unless_their_tables_limit_it(tmp_path: Path) -> None:
    text = (
        GATEWAY
        + '[nodes.a]\ntags = ["rollout"]\ngpus = 2\ncpus = 1.5\n[nodes.b]\ntags = ["rollout"]\ngpus = 1\n'
    )
    first, second = await LocalLauncher(load(tmp_path, text)).discover()
    assert (first.id, first.capacity.cpus, first.capacity.gpus) == ("a", 1.5, 2)
    assert second.capacity.cpus >= 1
    assert second.capacity.memory_gb > 0
