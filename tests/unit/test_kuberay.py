"""deploy/kuberay, as far as that can be told without Kubernetes: its parts agree with one another, and hold no secret."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.settings import Settings
from scheduler.cluster import sharing
from scheduler.cluster.errors import OutOfMemory
from scheduler.cluster.file import ClusterFile, GatewayFile, check_trainer, memory_of
from scheduler.cluster.tags import Capacity, Seen, assign, check_counts, match
from trainer.settings import Settings as TrainerSettings

FOLDER = Path(__file__).parents[2] / "deploy" / "kuberay"
DOCUMENTS = [
    document
    for name in ("cluster", "job")
    for document in yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text())
]


def kind(name: str) -> list[dict[str, Any]]:
    """The documents of a kind."""
    return [document for document in DOCUMENTS if document["kind"] == name]


(CLUSTER,), (JOB,), (SERVICE,) = kind("RayCluster"), kind("RayJob"), kind("Service")
PODS = [
    CLUSTER["spec"]["headGroupSpec"]["template"],
    *(group["template"] for group in CLUSTER["spec"]["workerGroupSpecs"]),
]


def test_the_workers_labels_are_what_the_cluster_file_asks_for() -> None:
    file = ClusterFile.load(FOLDER / "cluster.toml")
    there = [
        Seen(f"{group['groupName']}-{n}", group["labels"], Capacity(16, 1, 128))
        for group in CLUSTER["spec"]["workerGroupSpecs"]
        for n in range(group["replicas"])
    ]
    there.append(Seen("head", {}, Capacity()))
    nodes = match(file.wanted(), there, {})
    check_counts(file.wanted(), there, nodes)
    found = assign(nodes, file.engine_need, file.trainer_need)
    assert {place.node.seen.id for place in found.engines} == {"sampler-0", "sampler-1", "learner-0"}
    assert [place.node.seen.id for place in found.ranks] == ["learner-0"]
    gateway = GatewayFile.read(FOLDER / "gateway.toml", None)
    assert file.trainer is not None
    here = file.model_copy(
        update={"trainer": file.trainer.model_copy(update={"config": FOLDER / "trainer.toml"})}
    )
    (said,) = sharing.told(nodes, found, memory_of(here, gateway))
    assert said.startswith("learner: engine and trainer fit in turn: engine 73.6 + trainer 60.0 = 133.6 GiB")
    with pytest.raises(OutOfMemory, match="do not fit on one GPU"):
        sharing.told(nodes, found, memory_of(here, replace(gateway, sleeps=False)))


def test_the_files_are_what_each_part_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADGATE_ADMIN_KEY", "an admin key")
    gateway = Settings.load(FOLDER / "gateway.toml")
    assert GatewayFile.read(FOLDER / "gateway.toml", None).url == "http://127.0.0.1:8000"
    check_trainer(FOLDER / "trainer.toml")
    trainer = TrainerSettings.load(FOLDER / "trainer.toml")
    assert trainer.model.path == gateway.model.path
    assert trainer.gateway.url == f"http://{SERVICE['metadata']['name']}:{gateway.server.port}"
    file = ClusterFile.load(FOLDER / "cluster.toml")
    assert file.trainer is not None
    assert [str(file.gateway.config), str(file.trainer.config)] == [
        "files/gateway.toml",
        "files/trainer.toml",
    ]
    assert "scheduler run files/cluster.toml" in JOB["spec"]["entrypoint"]


def test_every_node_has_the_same_folder_and_keys_come_from_the_secret() -> None:
    assert CLUSTER["spec"]["authOptions"] == {"mode": "token"}
    for pod in PODS:
        (container,) = pod["spec"]["containers"]
        assert container["workingDir"] == "/headgate"
        assert {mount["name"] for mount in container["volumeMounts"]} == {"shared", "files"}
        assert pod["spec"]["volumes"] == PODS[0]["spec"]["volumes"]
        (key,) = [variable for variable in container["env"] if variable["name"] == "HEADGATE_ADMIN_KEY"]
        assert key["valueFrom"]["secretKeyRef"] == {"name": "headgate", "key": "admin-key"}
    assert not [v for pod in PODS for c in pod["spec"]["containers"] for v in c["env"] if "value" in v]


def test_policies_and_the_service_select_the_pods_that_there_are() -> None:
    labels = [pod["metadata"]["labels"].items() for pod in PODS]
    nodes, head = (policy["spec"]["podSelector"]["matchLabels"].items() for policy in kind("NetworkPolicy"))
    assert all(nodes <= pod for pod in labels), "whoever reaches an engine controls it"
    assert [head <= pod for pod in labels] == [True, False, False]
    assert SERVICE["spec"]["selector"].items() == head
    submitter = JOB["spec"]["submitterPodTemplate"]["metadata"]["labels"].items()
    assert nodes <= submitter
    assert JOB["spec"]["clusterSelector"] == {"ray.io/cluster": CLUSTER["metadata"]["name"]}


def test_ray_is_the_one_that_headgate_pins() -> None:
    project = tomllib.loads((FOLDER.parents[1] / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["ray"] == [f"ray=={CLUSTER['spec']['rayVersion']}"]
