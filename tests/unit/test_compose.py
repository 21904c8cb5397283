"""compose.yaml and deploy/, as far as they can be checked without Docker; and with its compose, where that is installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.config import EngineSettings, ModelSettings
from gateway.config.environment import ENVIRONMENT
from gateway.config.settings import ConfigError, Settings
from gateway.engines.process import _VLLM_ENV, _vllm_command
from trainer.commands.plan_memory import engine_bytes, plan
from trainer.config.settings import Settings as TrainerSettings
from trainer.memory_plan import GIB

ROOT = Path(__file__).parents[2]
COMPOSE = (ROOT / "compose.yaml").read_text()
DOCUMENTED = (ROOT / "docs" / "topics" / "deployment.md").read_text()
VARIABLE = re.compile(r"(?<!\$)\$\{(\w+)(:[-?][^}]*)?\}")
PROFILES = {
    "vllm": ["gpu"],
    "vllm-2": ["gpu-2"],
    "vllm-cpu": ["cpu"],
    "fake-engine": ["dev"],
    "trainer": ["train"],
    "trainer-cpu": ["train-cpu"],
}
ALWAYS = {"gateway", "postgres", "redis", "prometheus", "grafana"}
ENGINES = ("vllm", "vllm-2", "vllm-cpu", "fake-engine")
SHARE = "--gpu-memory-utilization"
SECRET = re.compile(r"PASSWORD|KEY|AUTH|SECRET|TOKEN")


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(COMPOSE)
    return found


SERVICES = compose()["services"]


def mounts(service: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Source, target and mode of each; variables as in the development's file, or their default."""
    return [(*_filled(mount).split(":"), "rw")[:3] for mount in service.get("volumes", ())]  # type: ignore[misc]


def _filled(text: str) -> str:
    return VARIABLE.sub(lambda m: (m[2] or "")[2:] if (m[2] or "").startswith(":-") else "given", text)


def test_services_and_profiles() -> None:
    assert SERVICES.keys() == ALWAYS | PROFILES.keys()
    for name, service in SERVICES.items():
        assert service.get("profiles", []) == PROFILES.get(name, []), name


@pytest.mark.parametrize("name", SERVICES)
def test_each_service_has_a_health_check_and_restarts(name: str) -> None:
    service = SERVICES[name]
    assert {"test", "interval", "timeout", "retries"} <= service["healthcheck"].keys()
    assert service["restart"] in ("unless-stopped", "on-failure")
    assert "image" in service
    assert ":" in service["image"]
    assert not service["image"].endswith(":latest")
    for waited_for, how in service.get("depends_on", {}).items():
        assert waited_for in SERVICES
        assert how == {"condition": "service_healthy"}


def test_engines_data_and_metrics_are_reached_from_inside_alone() -> None:
    networks = compose()["networks"]
    assert [name for name, given in networks.items() if not given.get("internal")] == ["front"]
    for name in ENGINES:
        assert list(SERVICES[name]["networks"]) == ["engines"]
        assert "ports" not in SERVICES[name]
    for name in ("postgres", "redis"):
        assert SERVICES[name]["networks"] == ["data"]
        assert "ports" not in SERVICES[name]
    for service in SERVICES.values():
        for port in service.get("ports", ()):
            assert port.startswith("${HEADGATE_BIND:-127.0.0.1}:")


def test_each_engine_has_a_name_of_its_own_so_that_none_is_scaled_and_each_is_paused() -> None:
    gpu = [SERVICES[name] for name in ("vllm", "vllm-2")]
    assert len({service["container_name"] for service in gpu}) == len(gpu)
    aliases = [alias for service in gpu for alias in service["networks"]["engines"]["aliases"]]
    assert aliases == ["engine", "engine-2"]
    assert all(f"http://{alias}:8000" in DOCUMENTED for alias in aliases), "how the gateway gets both"


def test_no_secret_is_written_down_or_has_a_default() -> None:
    for name, service in SERVICES.items():
        for variable, value in service.get("environment", {}).items():
            if SECRET.search(variable):
                assert re.fullmatch(r"\$\{\w+:\?[^}]+\}", value), (name, variable)
    for variable, rest in VARIABLE.findall(COMPOSE):
        if SECRET.search(variable):
            assert rest.startswith(":?"), variable
    assert not re.search(r"://[^$@\s/]*:[^$@\s/]+@", COMPOSE), "a password in a URL"


def test_the_file_for_development_gives_what_must_be_given_and_is_used_by_nothing_else() -> None:
    lines = (ROOT / "deploy" / "dev.env").read_text().splitlines()
    given = {line.split("=")[0] for line in lines if line and not line.startswith("#")}
    needed = {variable for variable, rest in VARIABLE.findall(COMPOSE) if rest.startswith(":?")}
    assert needed <= given
    assert not any("dev.env" in json.dumps(service) for service in SERVICES.values())


def test_every_variable_is_documented() -> None:
    variables = {variable for variable, _ in VARIABLE.findall(COMPOSE)} | ENVIRONMENT.keys()
    for service in SERVICES.values():
        variables |= {name for name in service.get("environment", {}) if name.startswith("HEADGATE")}
    assert sorted(v for v in variables if f"`{v}`" not in DOCUMENTED) == []


def test_every_mounted_file_is_there_and_read_only() -> None:
    volumes = compose()["volumes"]
    for name, service in SERVICES.items():
        for source, target, mode in mounts(service):
            if source.startswith("./"):
                assert (ROOT / source).exists(), (name, source)
                assert mode == "ro", (name, source)
            elif source != "given":
                assert source in volumes, (name, source)
            if target.endswith("/trainer"):  # weights: only the trainer writes them
                assert mode == ("rw" if name.startswith("trainer") else "ro")


def test_every_dockerfile_is_there_and_what_it_copies_is_sent() -> None:
    sent = (ROOT / ".dockerignore").read_text().split()
    for service in SERVICES.values():
        if build := service.get("build"):
            lines = (ROOT / build["dockerfile"]).read_text().splitlines()
            pinned = r"FROM python:\d+\.\d+\.\d+-slim-\w+(?: AS (\w+))?"
            stages = [re.fullmatch(pinned, x) for x in lines if x.startswith("FROM")]
            assert stages and all(stages), build["dockerfile"]
            built = {f"--from={stage[1]}" for stage in stages if stage}
            last = max(i for i, line in enumerate(lines) if line.startswith("FROM"))
            assert "USER headgate" in lines[last:]
            for line in lines:
                if not line.startswith("COPY") or line.split()[1] in built:
                    continue
                for source in line.split()[1:-1]:
                    assert (ROOT / source).exists(), source
                    assert f"!{source.split('/')[0]}" in sent, source


def test_the_mounted_settings_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in {
        "HEADGATE_ADMIN_KEY": "an admin key",
        "HEADGATE_CLUSTER_KEY": "0123456789abcdef",
        "HEADGATE_CLUSTER_URL": "http://me:8001",
        "HEADGATE_STORE_URL": "postgresql://headgate:x@postgres:5432/headgate",
        "HEADGATE_BUS_URL": "redis://:x@redis:6379/0",
        "HEADGATE_PUBLIC_URL": "http://gateway:8000",
    }.items():
        monkeypatch.setenv(variable, value)
    settings = Settings.load(ROOT / "deploy" / "gateway.toml")
    assert settings.store.url.startswith("postgresql://")
    assert settings.cluster.url == "http://me:8001"
    assert settings.server.url == "http://gateway:8000"
    for name in ("fake", "vllm"):
        Settings.load(ROOT / "examples" / "service" / f"{name}.toml")
    two = ["http://engine:8000", "http://engine-2:8000"]
    monkeypatch.setenv("HEADGATE_ENGINE_URLS", json.dumps({"policy": two}))
    assert list(Settings.load(ROOT / "deploy" / "gateway.toml").engine_of("policy").places) == two
    for wrong, words in (
        ("http://engine:8000", "must be JSON such as"),
        ('{"p": []}', "the configuration has: policy"),
    ):
        monkeypatch.setenv("HEADGATE_ENGINE_URLS", wrong)
        with pytest.raises(ConfigError, match=words):
            Settings.load(ROOT / "deploy" / "gateway.toml")
    stop = re.fullmatch(r"(\d+)s", SERVICES["gateway"]["stop_grace_period"])
    assert stop
    assert settings.server.shutdown_s < int(stop[1])
    trained = TrainerSettings.load(ROOT / "deploy" / "trainer.toml")
    assert trained.gateway.key == "an admin key"
    assert trained.model.path == settings.model.path


def test_vllm_is_started_as_the_gateway_would_start_it() -> None:
    for name, sleep, gpus in (("vllm", "level1", 2), ("vllm-2", "level1", 1), ("vllm-cpu", "pause", 1)):
        ours = _vllm_command(
            EngineSettings.model_validate({"sleep": sleep, "tensor_parallel": gpus}),
            ModelSettings(path=Path("/models/base")),
            "policy",
            "/models/base",
            "127.0.0.1",
            8000,
        )
        service = SERVICES[name]
        given = options_of(name)
        assert given.keys() - {SHARE} == {flag for flag in ours if flag.startswith("--")}
        assert given["--logprobs-mode"] == "processed_logprobs"
        assert _VLLM_ENV.items() <= service["environment"].items()


def options_of(name: str) -> dict[str, str]:
    """Return the options of an engine's service."""
    options = [*SERVICES[name]["entrypoint"][3:], *SERVICES[name].get("command", ())]
    return {option.split("=")[0]: _filled(option).partition("=")[2] for option in options}


def devices_of(name: str) -> list[dict[str, Any]]:
    """Return the devices that a service reserves."""
    found: list[dict[str, Any]] = SERVICES[name]["deploy"]["resources"]["reservations"]["devices"]
    return found


def test_vllm_and_the_trainer_have_a_gpu_each() -> None:
    ((vllm,), (second,), (trainer,)) = (devices_of(name) for name in ("vllm", "vllm-2", "trainer"))
    assert _filled(str(vllm["count"])) == options_of("vllm")["--tensor-parallel-size"] == "1"
    assert [_filled(each) for each in (*trainer["device_ids"], *second["device_ids"])] == ["1", "2"]
    assert "run.device=cuda" in SERVICES["trainer"]["command"], "it would train on the CPU without a word"
    assert "deploy" not in SERVICES["trainer-cpu"]


@pytest.mark.long
def test_vllm_and_the_trainer_have_one_gpu_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the arithmetic of `trainer plan-memory`, for a model of 8 billion weights' adapters on 80 GiB."""
    monkeypatch.setenv("HEADGATE_ADMIN_KEY", "an admin key")
    gateway = Settings.load(ROOT / "deploy" / "one-gpu" / "gateway.toml")
    ((name, node),) = gateway.nodes.items()
    apart = Settings.load(ROOT / "deploy" / "gateway.toml")
    assert node.urls == (apart.engine.url,) and gateway.models == apart.models
    assert gateway.engine.sleep != "pause" and "--enable-sleep-mode" in options_of("vllm")
    shapes = f"model.path={ROOT / 'recipes' / 'shapes' / 'Qwen3-8B'}"
    trained = TrainerSettings.load(
        ROOT / "deploy" / "one-gpu" / "trainer.toml", [shapes, "model.lora.rank=32"]
    )
    assert trained.gateway.nodes == (name,) and name in gateway.nodes
    found = plan(trained, 1, 80 * GIB, engine_bytes(options_of("vllm")[SHARE], 80 * GIB))
    assert found.engine is not None and found.engine.kind == "in turn", found.engine
    alone = plan(trained.model_copy(update={"gateway": trained.gateway.model_copy(update={"nodes": ()})}),
                 1, 80 * GIB, engine_bytes(options_of("vllm")[SHARE], 80 * GIB))  # fmt: skip
    assert alone.engine is not None and alone.engine.kind == "not at all", "they would not take turns"


def test_prometheus_and_grafana_find_one_another_and_the_gateways() -> None:
    folder = ROOT / "deploy" / "grafana" / "provisioning"
    (source,) = yaml.safe_load((folder / "datasources" / "prometheus.yml").read_text())["datasources"]
    (provider,) = yaml.safe_load((folder / "dashboards" / "headgate.yml").read_text())["providers"]
    dashboard = json.loads((ROOT / "deploy" / "grafana" / "dashboards" / "headgate.json").read_text())
    targets = [t for panel in dashboard["panels"] for t in panel.get("targets", ())]
    assert {t["datasource"]["uid"] for t in targets} == {source["uid"]}
    assert any(target == provider["options"]["path"] for _, target, _ in mounts(SERVICES["grafana"]))
    assert source["url"] == "http://prometheus:9090"
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    given = tomllib.loads((ROOT / "deploy" / "gateway.toml").read_text())
    (job,) = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())["scrape_configs"]
    assert job["dns_sd_configs"][0]["names"] == ["gateway"]
    assert job["dns_sd_configs"][0]["port"] == given["server"]["port"]


def test_promtool_agrees() -> None:
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    for what in (("config", "prometheus.yml"), ("rules", "alerts.yml")):
        done = subprocess.run(
            [promtool, "check", what[0], ROOT / "deploy" / what[1]], capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr.decode()


def test_docker_compose_agrees(tmp_path: Path) -> None:
    command = _docker_compose()
    if command is None:
        pytest.skip("neither `docker compose` nor a `docker-compose` of version 2 is installed")
    argv = [*command, "--project-directory", str(ROOT), "-f", str(ROOT / "compose.yaml")]
    env = ["--env-file", str(ROOT / "deploy" / "dev.env")]
    for profile in ("dev", "gpu", "gpu-2", "cpu", "train", "train-cpu"):
        done = subprocess.run(
            [*argv, *env, "--profile", profile, "config", "--services"], capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr.decode()
        expected = ALWAYS | {name for name, profiles in PROFILES.items() if profile in profiles}
        assert set(done.stdout.decode().split()) == expected
    (nothing := tmp_path / "env").touch()
    bare = subprocess.run(
        [*argv, "--env-file", str(nothing), "config", "-q"], capture_output=True, check=False, env={}
    )
    assert bare.returncode != 0
    assert b"missing a value" in bare.stderr


def _docker_compose() -> list[str] | None:
    for command in (["docker", "compose"], ["docker-compose"]):
        if found := shutil.which(command[0]):
            command[0] = found
            done = subprocess.run([*command, "version", "--short"], capture_output=True, check=False)
            if done.returncode == 0 and int(done.stdout.decode().strip().lstrip("v").split(".")[0]) >= 2:
                return command
    return None
