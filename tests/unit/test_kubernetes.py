"""deploy/kuberay and deploy/kubernetes, as far as that can be checked without a cluster: valid, agreeing, without a secret."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from gateway.config import EngineSettings, ModelSettings
from gateway.config.settings import Settings
from gateway.engines.process import _VLLM_ENV, _vllm_command
from scheduler.cluster import sharing
from scheduler.cluster.errors import OutOfMemory
from scheduler.cluster.file import ClusterFile, check_trainer, memory_of
from scheduler.cluster.gateway_file import GatewayFile
from scheduler.cluster.tags import Capacity, DiscoveredNode, assign, check_counts, match
from trainer.config.settings import Settings as TrainerSettings

DEPLOY = Path(__file__).parents[2] / "deploy"
FOLDER, PLAIN = DEPLOY / "kuberay", DEPLOY / "kubernetes"
KUBERNETES = "1.33"
OF_KUBERAY = {"RayCluster", "RayJob"}
"""Kinds whose schema is KubeRay's and is not installed; its rules that these files once broke are below."""
KEYS = "headgate-keys"
"""The secret."""


def documents(folder: Path) -> list[dict[str, Any]]:
    """Return the objects that `kubectl` would make of a folder, without the kustomization's own."""
    return [
        document
        for path in sorted(folder.glob("*.yaml"))
        for document in yaml.safe_load_all(path.read_text())
        if document["kind"] != "Kustomization"
    ]


RAY = documents(FOLDER)
WITHOUT_RAY = [*documents(PLAIN), *yaml.safe_load_all((FOLDER / "volume.yaml").read_text())]


def kind(name: str, of: list[dict[str, Any]] = RAY) -> list[dict[str, Any]]:
    """Return the objects of a kind."""
    return [document for document in of if document["kind"] == name]


(CLUSTER,), (JOB,), (SERVICE,) = kind("RayCluster"), kind("RayJob"), kind("Service")
PODS = [
    CLUSTER["spec"]["headGroupSpec"]["template"],
    *(group["template"] for group in CLUSTER["spec"]["workerGroupSpecs"]),
]


def templates(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the templates of pods in an object, wherever they are."""
    if isinstance(value, dict):
        if "containers" in value.get("spec", {}):
            yield value
        for inner in value.values():
            yield from templates(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from templates(inner)


@pytest.mark.parametrize("folder", [FOLDER, PLAIN], ids=lambda folder: folder.name)
def test_the_objects_have_the_form_that_kubernetes_asks_for(folder: Path) -> None:
    for document in documents(folder):
        if document["kind"] not in OF_KUBERAY:
            kubernetes_validate.validate(document, KUBERNETES, strict=True)


@pytest.mark.parametrize("objects", [RAY, WITHOUT_RAY], ids=["kuberay", "kubernetes"])
def test_names_are_there_once_and_whatever_is_named_is_there(objects: list[dict[str, Any]]) -> None:
    names = [(document["kind"], document["metadata"]["name"]) for document in objects]
    assert len(set(names)) == len(names)
    labels = [template["metadata"]["labels"].items() for template in templates(objects)]
    for service in kind("Service", objects):
        assert any(service["spec"]["selector"].items() <= pod for pod in labels), service["metadata"]["name"]
    for template in templates(objects):
        spec = template["spec"]
        given = {volume["name"]: volume for volume in spec.get("volumes", ())}
        for container in spec["containers"]:
            assert {mount["name"] for mount in container.get("volumeMounts", ())} <= given.keys()
            ports = {port["name"] for port in container.get("ports", ())}
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                if probe in container:
                    assert container[probe]["httpGet"]["port"] in ports
            for variable in container.get("env", ()):
                secret = variable.get("valueFrom", {}).get("secretKeyRef")
                assert secret is None or secret["name"] == KEYS, "KubeRay has a secret of the cluster's name"
                assert secret is not None or not any(
                    w in variable["name"] for w in ("KEY", "STORE", "BUS_URL")
                )
        claims = [
            v["persistentVolumeClaim"]["claimName"] for v in given.values() if "persistentVolumeClaim" in v
        ]
        assert all(("PersistentVolumeClaim", name) in names for name in claims)


@pytest.mark.parametrize("folder", [FOLDER, PLAIN], ids=lambda folder: folder.name)
def test_images_and_files_come_from_the_kustomization(folder: Path) -> None:
    given = yaml.safe_load((folder / "kustomization.yaml").read_text())
    named = {image["name"] for image in given["images"]}
    assert all(image["newTag"] != "latest" for image in given["images"])
    resources = [d for path in given["resources"] for d in yaml.safe_load_all((folder / path).read_text())]
    for template in templates(resources):
        for container in template["spec"]["containers"]:
            assert container["image"] in named or ":v" in container["image"]
    made = {generated["name"]: generated["files"] for generated in given["configMapGenerator"]}
    for files in made.values():
        assert all((folder / name).is_file() for name in files)
    mounted = {
        v["configMap"]["name"] for t in templates(resources) for v in t["spec"]["volumes"] if "configMap" in v
    }
    assert mounted == made.keys()


def test_gateways_engines_and_trainer_without_ray_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    (gateways,), (engines,) = kind("Deployment", WITHOUT_RAY), kind("StatefulSet", WITHOUT_RAY)
    (container,), (engine,) = (each["spec"]["template"]["spec"]["containers"] for each in (gateways, engines))
    for variable in container["env"]:
        monkeypatch.setenv(variable["name"], {
            "HEADGATE_STORE_URL": "postgresql://u:p@h/d", "HEADGATE_BUS_URL": "redis://h:6379/0",
            "HEADGATE_CLUSTER_KEY": "0123456789abcdef",
        }.get(variable["name"], variable.get("value", "an admin key").replace("$(POD_IP)", "10.0.0.1")))  # fmt: skip
    settings = Settings.load(PLAIN / "gateway.toml")
    name, service = engines["metadata"]["name"], engines["spec"]["serviceName"]
    assert list(settings.engine.places) == [
        f"http://{name}-{i}.{service}:8000" for i in range(engines["spec"]["replicas"])
    ]
    ours = _vllm_command(
        EngineSettings(sleep="pause"),
        ModelSettings(path=Path("x"), max_model_len=8192),
        "policy",
        "m",
        "h",
        1,
    )
    given = {option.partition("=")[0]: option.partition("=")[2] for option in engine["args"]}
    assert given.keys() == {flag for flag in ours if flag.startswith("--")}
    assert Path(given["--model"]) == settings.models["policy"].path
    assert int(given["--max-model-len"]) == settings.models["policy"].max_model_len
    plugin = {"PYTHONPATH": engine["volumeMounts"][-1]["mountPath"]}
    assert {variable["name"]: variable["value"] for variable in engine["env"]} == _VLLM_ENV | plugin
    stop = gateways["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert stop > 5 + settings.server.shutdown_s + 25
    assert settings.server.url == f"http://{kind('Service', WITHOUT_RAY)[1]['metadata']['name']}:8000"
    trainer = TrainerSettings.load(PLAIN / "trainer.toml")
    assert (trainer.gateway.url, trainer.run.device) == (settings.server.url, "cuda")
    assert trainer.model.path == settings.models["policy"].path


def test_the_workers_labels_are_what_the_cluster_file_asks_for() -> None:
    file = ClusterFile.load(FOLDER / "cluster.toml")
    there = [
        DiscoveredNode(f"{group['groupName']}-{n}", group["labels"], Capacity(16, 1, 128))
        for group in CLUSTER["spec"]["workerGroupSpecs"]
        for n in range(group["replicas"])
    ]
    there.append(DiscoveredNode("head", {}, Capacity()))
    nodes = match(file.wanted(), there, {})
    check_counts(file.wanted(), there, nodes)
    found = assign(nodes, file.engine_need, file.trainer_need)
    assert {place.node.discovered.id for place in found.engines} == {"sampler-0", "sampler-1", "learner-0"}
    assert [place.node.discovered.id for place in found.ranks] == ["learner-0"]
    gateway = GatewayFile.read(FOLDER / "gateway.toml", None)
    assert file.trainer is not None
    here = file.model_copy(
        update={"trainer": file.trainer.model_copy(update={"config": FOLDER / "trainer.toml"})}
    )
    (report,) = sharing.shared_nodes(nodes, found, memory_of(here, gateway))
    assert report.startswith(
        "learner: engine and trainer fit in turn: engine 73.6 + trainer 60.0 = 133.6 GiB"
    )
    with pytest.raises(OutOfMemory, match="do not fit on one GPU"):
        sharing.shared_nodes(nodes, found, memory_of(here, replace(gateway, sleeps=False)))


def test_the_files_are_what_each_part_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADGATE_ADMIN_KEY", "an admin key")
    monkeypatch.setenv("HEADGATE_STORE_URL", "postgresql://u:p@h/d")
    gateway = Settings.load(FOLDER / "gateway.toml")
    assert GatewayFile.read(FOLDER / "gateway.toml", None).url == "http://127.0.0.1:8000"
    check_trainer(FOLDER / "trainer.toml")
    trainer = TrainerSettings.load(FOLDER / "trainer.toml")
    assert trainer.model.path == gateway.model.path
    assert trainer.gateway.url == f"http://{SERVICE['metadata']['name']}:{gateway.server.port}"
    assert gateway.server.url == trainer.gateway.url, "what agents get"
    assert gateway.store.url.startswith("postgresql://"), "SQLite does not work on a volume of several nodes"
    image = (FOLDER / "Dockerfile").read_text()
    assert f"/usr/local/bin/{gateway.engine.python}" in image and "pip check" in image
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
        assert "HEADGATE_ADMIN_KEY" in [variable["name"] for variable in container["env"]]
    assert CLUSTER["metadata"]["name"] != KEYS
    waits = [
        v["value"] for v in PODS[0]["spec"]["containers"][0]["env"] if v["name"] == "RAY_JOB_STOP_WAIT_TIME_S"
    ]
    shutdown_s = tomllib.loads((FOLDER / "gateway.toml").read_text())["server"]["shutdown_s"]
    assert float(waits[0]) > shutdown_s, "Ray kills what has not ended by then"


def test_policies_and_the_service_select_the_pods_that_there_are() -> None:
    labels = [pod["metadata"]["labels"].items() for pod in PODS]
    nodes, head = (policy["spec"]["podSelector"]["matchLabels"].items() for policy in kind("NetworkPolicy"))
    assert all(nodes <= pod for pod in labels), "a client that reaches an engine controls it"
    assert [head <= pod for pod in labels] == [True, False, False]
    assert SERVICE["spec"]["selector"].items() == head
    submitter = JOB["spec"]["submitterPodTemplate"]["metadata"]["labels"].items()
    assert nodes <= submitter
    assert "backoffLimit" not in JOB["spec"], "KubeRay refuses it with a clusterSelector"
    assert JOB["spec"]["clusterSelector"] == {"ray.io/cluster": CLUSTER["metadata"]["name"]}


def test_the_cluster_runs_the_ray_of_the_lock_file() -> None:
    version = CLUSTER["spec"]["rayVersion"]
    assert f"ray=={version}" in (DEPLOY.parent / "requirements" / "lock.txt").read_text().splitlines()
    assert f'"ray[default]=={version}"' in (FOLDER / "Dockerfile").read_text()
